#include "base/proc.h"

#include <fstream>
#include <sstream>

namespace torch_ucx_rpc {

std::optional<ProcStat> readProcStat(const std::string& directory) {
  std::ifstream file(directory + "/stat");
  std::string line;
  std::getline(file, line);
  const size_t nameEnd = line.rfind(')'); // the name, field 2, may contain anything
  if (nameEnd == std::string::npos) {
    return std::nullopt;
  }
  std::istringstream fields(line.substr(nameEnd + 1));
  const auto skip = [&fields](int count) {
    for (std::string skipped; count > 0; --count) {
      fields >> skipped;
    }
  };
  ProcStat stat;
  uint64_t userTicks = 0;
  uint64_t systemTicks = 0;
  fields >> stat.state; // field 3
  skip(10);
  fields >> userTicks >> systemTicks; // fields 14 and 15
  skip(6);
  fields >> stat.startTicks; // field 22
  stat.cpuTicks = userTicks + systemTicks;
  return stat;
}

} // namespace torch_ucx_rpc
