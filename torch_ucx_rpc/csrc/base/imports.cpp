#include "base/imports.h"

#include <elf.h>
#include <link.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace torch_ucx_rpc {

namespace {

#if defined(__x86_64__)
constexpr uint64_t kCallSlot = R_X86_64_JUMP_SLOT, kDataSlot = R_X86_64_GLOB_DAT;
#elif defined(__aarch64__)
constexpr uint64_t kCallSlot = R_AARCH64_JUMP_SLOT, kDataSlot = R_AARCH64_GLOB_DAT;
#else
constexpr uint64_t kCallSlot = ~uint64_t{0}, kDataSlot = ~uint64_t{0}; // nothing is replaced
#endif

// The imports of one library.
struct Imports {
  const void* ofTheLibrary; // any function of it
  std::span<Import> all;
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
  __atomic_store_n(slot, value, __ATOMIC_RELEASE); // other threads may be calling it
  if (isReadOnly) {
    (void)mprotect(start, page, PROT_READ);
  }
  return true;
}

// The loader's data of a library.
struct Library {
  uintptr_t base = 0;
  uintptr_t readOnlyFrom = 0; // since the loader was done
  uintptr_t readOnlyTo = 0;
  const ElfW(Sym) * symbols = nullptr;
  const char* names = nullptr;
  const uint16_t* versions = nullptr; // by symbol; null in a library without versions
  std::span<const ElfW(Rela)> calledSlots;
  std::span<const ElfW(Rela)> otherSlots;

  // libc's symbols have a version. Most of torch's 40,000 imports have none: to read their names takes 3 ms.
  bool mayBeOfLibc(size_t symbol) const {
    constexpr uint16_t kHidden = 0x8000;
    return versions == nullptr || (versions[symbol] & ~kHidden) > VER_NDX_GLOBAL;
  }

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
    size_t unnamed = 0; // how many of `others` have no symbol; they come first
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
        case DT_VERSYM:
          versions = reinterpret_cast<const uint16_t*>(address);
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
        case DT_RELACOUNT:
          unnamed = entry->d_un.d_val;
          break;
        default:
          break;
      }
    }
    if (symbols != nullptr && names != nullptr) { // else there are no names to look for
      calledSlots = {called, called != nullptr ? calledBytes / sizeof(ElfW(Rela)) : 0};
      otherSlots = {others, others != nullptr ? otherBytes / sizeof(ElfW(Rela)) : 0};
      otherSlots = otherSlots.subspan(std::min(unnamed, otherSlots.size()));
    }
  }
};

void replaceIn(const Library& library, std::span<const ElfW(Rela)> slots, Imports& imports) {
  for (const ElfW(Rela) & one : slots) {
    const uint64_t type = ELF64_R_TYPE(one.r_info);
    const size_t symbol = ELF64_R_SYM(one.r_info);
    if ((type != kCallSlot && type != kDataSlot) || !library.mayBeOfLibc(symbol)) {
      continue;
    }
    const char* const name = library.names + library.symbols[symbol].st_name;
    for (Import& import : imports.all) {
      if (std::strcmp(name, import.name) == 0) {
        const uintptr_t slot = library.base + one.r_offset;
        const bool isReadOnly = slot >= library.readOnlyFrom && slot < library.readOnlyTo;
        import.isReplaced |= overwrite(reinterpret_cast<void**>(slot), import.replacement, isReadOnly);
      }
    }
  }
}

int replaceInLibrary(dl_phdr_info* info, size_t /*size*/, void* context) {
  Imports& imports = *static_cast<Imports*>(context);
  if (!contains(*info, imports.ofTheLibrary)) {
    return 0;
  }
  const Library library(*info);
  replaceIn(library, library.calledSlots, imports);
  replaceIn(library, library.otherSlots, imports);
  return 1;
}

} // namespace

bool replaceImports(const void* ofTheLibrary, std::span<Import> imports) {
  Imports wanted{ofTheLibrary, imports};
  (void)dl_iterate_phdr(&replaceInLibrary, &wanted);
  return std::ranges::all_of(imports, &Import::isReplaced);
}

} // namespace torch_ucx_rpc
