#pragma once

#include <array>

namespace torch_ucx_rpc {

// A few open files kept for the moment when the process may open no more: control frames, for which other workers wait,
// can then still connect. For one thread at a time.
class FileReserve {
 public:
  FileReserve() {
    refill();
  }
  ~FileReserve() {
    release();
  }
  FileReserve(const FileReserve&) = delete;
  FileReserve& operator=(const FileReserve&) = delete;

  // Closes them: the process may open as many again.
  void release();
  // Opens as many as it may.
  void refill();

 private:
  // A connection of UCX over TCP takes one for each lane, two by default.
  std::array<int, 8> files_{-1, -1, -1, -1, -1, -1, -1, -1};
};

} // namespace torch_ucx_rpc
