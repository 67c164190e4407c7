#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Storage.h>

namespace torch_ucx_rpc {

// Whether the storage owns its memory alone, so that lending can keep the memory. Memory of at::from_blob() without a
// deleter has no owner. torch itself shares the memory of copy-on-write storages. Memory of both kinds must be copied.
bool isMemoryOwned(const c10::Storage& storage);

// Memory that a message lends to the transport. It stays allocated as long as this object lives, even if its tensor
// gets other memory in the meantime:
// - `tensor.data = ...`, `tensor.set_(...)` and the like give the tensor another storage. The loan holds the old one.
// - `tensor.resize_(...)`, `out=tensor` and the like give the storage other memory. The loan shares the old memory with
//   the storage. This works for resizable CPU memory from torch's allocator and from the host pool. Most other memory
//   is not resizable. Pinned memory and device memory stay mapped when they are freed. So resizing them during the send
//   can change the bytes that arrive, but is safe otherwise.
//
// lend() may run on several threads for one storage. It replaces the context and the deleter of the memory, never its
// address.
class LentMemory {
 public:
  static LentMemory lend(c10::Storage storage);

 private:
  LentMemory(c10::Storage storage, c10::DataPtr memory);

  c10::Storage storage_;
  c10::DataPtr memory_; // a share of the memory, where it can be shared
};

} // namespace torch_ucx_rpc
