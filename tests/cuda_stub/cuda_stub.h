#pragma once

// A CUDA driver without a GPU, for tests of what UCX does with device memory: libcuda.so.1 and libnvidia-ml.so.1, as
// far as UCX's CUDA transports use them. Memory of the device is the host's, in a memory file that other processes map
// when they open an IPC handle. One thread of each process is the device: it runs the work of the streams later, in
// order. The numbers and signatures come from CUDA 12 and 13.
//
// Each process has a driver of its own, with one device. Beside CUDA's functions the library has those below, by which
// a test holds the device, and counts calls. Environment variables control processes that no test can speak to:
//
// CUDA_STUB_COPY_US    how long a copy takes at least
// CUDA_STUB_EVENT_US   how long after its turn an event is done; CUDA's own take 5 to 10 us on a stream that is idle
// CUDA_STUB_NVLINKS    how many NVLinks the device has (0); without any, UCX reads no other process's memory, and only
// writes
// CUDA_STUB_IPC=n      no IPC handle can be opened, as between containers
// CUDA_STUB_CALLS      a file, whose name gets the process's number appended, for the number of calls of each function,
// at the end

#include <cstdint>

extern "C" {

// No work in any stream begins while the device is held.
void cudaStubHold(bool isHeld);

// The number of calls of a driver function so far, by its name, such as "cuMemcpyAsync".
uint64_t cudaStubCalls(const char* function);

// The time that threads of this process have spent in cuStreamSynchronize so far, in total.
uint64_t cudaStubBlockedUs();

} // extern "C"
