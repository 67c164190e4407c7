#include "transport/ucp/files_for_ucx.h"

#include "base/file_reserve.h"

#include <link.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <time.h>
#include <ucs/type/status.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <span>

namespace torch_ucx_rpc {

namespace {

bool isLackOfFiles(int error) {
  return error == EMFILE || error == ENFILE;
}

// Whether the listening socket itself is no good. All else befalls one connection, or passes (accept(2)).
bool isOfTheListener(int error) {
  return error == EBADF || error == EINVAL || error == ENOTSOCK || error == EFAULT;
}

// Never destroyed: UCX's threads may use it until the process ends.
struct Reserve {
  std::mutex mutex;
  FileReserve files; // guarded by mutex, as all below
  int users = 0;
};

Reserve& reserve() {
  static auto* const only = new Reserve();
  return *only;
}

// After a cut, TCP doubles the wait before each further attempt, so that the first answer would come as long after the
// cut as that lasted. A bound of a second keeps it short. The kernel would then give a connection up after its usual 15
// attempts, so it is told the time that these take by default. Sockets that are accepted inherit both. Kernels before
// 6.15 have no such bound.
void boundResending(int domain, int type, int socket) {
#ifndef TCP_RTO_MAX_MS
  constexpr int TCP_RTO_MAX_MS = 44;
#endif
  constexpr int kLongestWaitMs = 1000;
  constexpr int kGivenUpAfterMs = 924'000;
  const bool isTcp = (domain == AF_INET || domain == AF_INET6) && (type & SOCK_STREAM) != 0;
  if (isTcp && setsockopt(socket, IPPROTO_TCP, TCP_RTO_MAX_MS, &kLongestWaitMs, sizeof(kLongestWaitMs)) == 0) {
    (void)setsockopt(socket, IPPROTO_TCP, TCP_USER_TIMEOUT, &kGivenUpAfterMs, sizeof(kGivenUpAfterMs));
  }
}

int socketForUcx(int domain, int type, int protocol) {
  Reserve& reserve = torch_ucx_rpc::reserve();
  const std::lock_guard lock(reserve.mutex);
  int socket = ::socket(domain, type, protocol);
  if (socket < 0 && isLackOfFiles(errno)) {
    reserve.files.release();
    socket = ::socket(domain, type, protocol);
  }
  const int error = errno;
  if (socket >= 0) {
    boundResending(domain, type, socket);
  }
  if (reserve.users > 0) {
    reserve.files.refill();
  }
  errno = error;
  return socket;
}

// Of the thread that accepts connections: one has to wait for want of files.
thread_local bool isConnectionWaiting = false;
constexpr timespec kPause{.tv_sec = 0, .tv_nsec = 1'000'000};

// UCX takes EAGAIN for "nobody is there", and asks again as long as somebody is. The reserve is not for connections
// that come in: as many may come as there are workers, and UCX looks at a network card for each.
int acceptForUcx(int listener, sockaddr* address, socklen_t* length) {
  const int connection = ::accept(listener, address, length);
  if (connection < 0 && !isOfTheListener(errno)) {
    isConnectionWaiting = isLackOfFiles(errno);
    errno = EAGAIN;
  }
  return connection;
}

// While a connection waits, UCX's thread would ask for it without a pause, and hold the lock of the worker each time.
// On a single core no other thread would get that lock, as whoever wants it spins. The pause is here, where the thread
// has no lock. A thread that only looks has the lock, and goes on.
int epollWaitForUcx(int epoll, epoll_event* events, int most, int timeoutMs) {
  if (timeoutMs != 0 && isConnectionWaiting) {
    isConnectionWaiting = false;
    (void)nanosleep(&kPause, nullptr);
  }
  return ::epoll_wait(epoll, events, most, timeoutMs);
}

// ------------------------------------------------------------------------------------------- the imports of a library

#if defined(__x86_64__)
constexpr uint64_t kCallSlot = R_X86_64_JUMP_SLOT, kDataSlot = R_X86_64_GLOB_DAT;
#elif defined(__aarch64__)
constexpr uint64_t kCallSlot = R_AARCH64_JUMP_SLOT, kDataSlot = R_AARCH64_GLOB_DAT;
#else
constexpr uint64_t kCallSlot = ~uint64_t{0}, kDataSlot = ~uint64_t{0}; // nothing is replaced
#endif

struct Import {
  const char* name;
  void* replacement;
  bool isReplaced = false;
};

// The imports of one library.
struct Imports {
  const void* ofTheLibrary; // some function of it
  std::array<Import, 3> all;
};

bool contains(const dl_phdr_info& library, const void* address) {
  for (const ElfW(Phdr) & segment : std::span(library.dlpi_phdr, library.dlpi_phnum)) {
    const auto offset = reinterpret_cast<uintptr_t>(address) - library.dlpi_addr - segment.p_vaddr;
    if (segment.p_type == PT_LOAD && offset < segment.p_memsz) {
      return true;
    }
  }
  return false;
}

// The slot may be in memory that the loader has made read-only once it was done.
bool overwrite(void** slot, void* value, bool isReadOnly) {
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  void* const start = reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(slot) / page * page);
  if (isReadOnly && mprotect(start, page, PROT_READ | PROT_WRITE) != 0) {
    return false;
  }
  __atomic_store_n(slot, value, __ATOMIC_RELEASE); // UCX's threads may be calling it
  if (isReadOnly) {
    (void)mprotect(start, page, PROT_READ);
  }
  return true;
}

// What the loader knows of a library.
struct Library {
  uintptr_t base = 0;
  uintptr_t readOnlyFrom = 0; // since the loader was done
  uintptr_t readOnlyTo = 0;
  const ElfW(Sym) * symbols = nullptr;
  const char* names = nullptr;
  std::span<const ElfW(Rela)> calledSlots;
  std::span<const ElfW(Rela)> otherSlots;

  explicit Library(const dl_phdr_info& info) : base(info.dlpi_addr) {
    for (const ElfW(Phdr) & segment : std::span(info.dlpi_phdr, info.dlpi_phnum)) {
      if (segment.p_type == PT_DYNAMIC) {
        readDynamic(reinterpret_cast<const ElfW(Dyn)*>(base + segment.p_vaddr));
      } else if (segment.p_type == PT_GNU_RELRO) {
        readOnlyFrom = base + segment.p_vaddr;
        readOnlyTo = readOnlyFrom + segment.p_memsz;
      }
    }
  }

 private:
  void readDynamic(const ElfW(Dyn) * entry) {
    const ElfW(Rela)* called = nullptr;
    const ElfW(Rela)* others = nullptr;
    size_t calledBytes = 0;
    size_t otherBytes = 0;
    for (; entry->d_tag != DT_NULL; ++entry) {
      // glibc has turned offsets into addresses, other loaders leave them.
      const uintptr_t value = entry->d_un.d_ptr;
      const uintptr_t address = value < base ? base + value : value;
      switch (entry->d_tag) {
        case DT_SYMTAB:
          symbols = reinterpret_cast<const ElfW(Sym)*>(address);
          break;
        case DT_STRTAB:
          names = reinterpret_cast<const char*>(address);
          break;
        case DT_JMPREL:
          called = reinterpret_cast<const ElfW(Rela)*>(address);
          break;
        case DT_RELA:
          others = reinterpret_cast<const ElfW(Rela)*>(address);
          break;
        case DT_PLTRELSZ:
          calledBytes = entry->d_un.d_val;
          break;
        case DT_RELASZ:
          otherBytes = entry->d_un.d_val;
          break;
        default:
          break;
      }
    }
    if (symbols != nullptr && names != nullptr) { // else there are no names to look for
      calledSlots = {called, called != nullptr ? calledBytes / sizeof(ElfW(Rela)) : 0};
      otherSlots = {others, others != nullptr ? otherBytes / sizeof(ElfW(Rela)) : 0};
    }
  }
};

void replaceIn(const Library& library, std::span<const ElfW(Rela)> slots, Imports& imports) {
  for (const ElfW(Rela) & one : slots) {
    const uint64_t type = ELF64_R_TYPE(one.r_info);
    if (type != kCallSlot && type != kDataSlot) {
      continue;
    }
    const char* const name = library.names + library.symbols[ELF64_R_SYM(one.r_info)].st_name;
    for (Import& import : imports.all) {
      if (std::strcmp(name, import.name) == 0) {
        const uintptr_t slot = library.base + one.r_offset;
        const bool isReadOnly = slot >= library.readOnlyFrom && slot < library.readOnlyTo;
        import.isReplaced |= overwrite(reinterpret_cast<void**>(slot), import.replacement, isReadOnly);
      }
    }
  }
}

int replaceImports(dl_phdr_info* info, size_t /*size*/, void* context) {
  Imports& imports = *static_cast<Imports*>(context);
  if (!contains(*info, imports.ofTheLibrary)) {
    return 0;
  }
  const Library library(*info);
  replaceIn(library, library.calledSlots, imports);
  replaceIn(library, library.otherSlots, imports);
  return 1;
}

// For the whole process, once.
bool replaceImportsOfUcx() {
  static const bool areReplaced = [] {
    Imports imports{
        reinterpret_cast<const void*>(&ucs_status_string),
        {{{"accept", reinterpret_cast<void*>(&acceptForUcx)},
          {"epoll_wait", reinterpret_cast<void*>(&epollWaitForUcx)},
          {"socket", reinterpret_cast<void*>(&socketForUcx)}}}};
    (void)dl_iterate_phdr(&replaceImports, &imports);
    return std::ranges::all_of(imports.all, &Import::isReplaced);
  }();
  return areReplaced;
}

} // namespace

FilesForUcx::FilesForUcx() : isUsed_(replaceImportsOfUcx()) {
  const std::lock_guard lock(reserve().mutex);
  ++reserve().users;
  reserve().files.refill();
}

FilesForUcx::~FilesForUcx() {
  const std::lock_guard lock(reserve().mutex);
  if (--reserve().users == 0) {
    reserve().files.release();
  }
}

} // namespace torch_ucx_rpc
