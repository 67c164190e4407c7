#pragma once

// A CUDA driver without a GPU, for tests of what UCX does with device memory: libcuda.so.1 and libnvidia-ml.so.1, as
// far as UCX's CUDA transports use them. The device's memory is a memory file on the host. Other processes map it when
// they open an IPC handle. One thread of each process is the device: it runs the work of the streams later, in order.
// The numbers and signatures come from CUDA 12 and 13.
//
// Each process has its own driver, with one device. Beside CUDA's functions the library has those below: a test can
// hold the device and count calls. Environment variables control processes that a test cannot call:
//
// CUDA_STUB_COPY_US    the minimal time of a copy
// CUDA_STUB_EVENT_US   the time from an event's turn until it is done; with CUDA 5 to 10 us on an idle stream
// CUDA_STUB_NVLINKS    the number of the device's NVLinks (0); without NVLinks UCX only writes other processes' memory
// CUDA_STUB_IPC=n      no IPC handle can be opened, as between containers
// CUDA_STUB_CALLS      a file for the number of calls of each function, written at the end; the pid is appended to its
// name

#include <cstdint>

extern "C" {

// While the device is held, no work begins in any stream.
void cudaStubHold(bool isHeld);

// Returns the number of calls so far of a driver function, such as "cuMemcpyAsync".
uint64_t cudaStubCalls(const char* function);

// Returns the total time that threads of this process have spent in cuStreamSynchronize.
uint64_t cudaStubBlockedUs();

} // extern "C"
