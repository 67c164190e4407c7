#pragma once

#include <array>

namespace torch_ucx_rpc {

// Keeps a few files open in reserve, for the moment when the process may open no more. Once they are released, the
// process can open as many others: to connect for a control frame that another worker waits for, or for a socket that
// UCX cannot do without. Not thread-safe.
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

  // Closes the files, so that the process may open as many others.
  void release();
  // Opens as many files as the process may, up to the size of the reserve.
  void refill();

 private:
  // A connection of UCX over TCP takes a file for each lane, two by default.
  std::array<int, 8> files_{-1, -1, -1, -1, -1, -1, -1, -1};
};

} // namespace torch_ucx_rpc
