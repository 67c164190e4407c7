#include "base/file_reserve.h"

#include <fcntl.h>
#include <unistd.h>

#include <utility>

namespace torch_ucx_rpc {

void FileReserve::release() {
  for (int& file : files_) {
    if (file >= 0) {
      ::close(std::exchange(file, -1));
    }
  }
}

void FileReserve::refill() {
  for (int& file : files_) {
    if (file < 0) {
      file = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
    }
  }
}

} // namespace torch_ucx_rpc
