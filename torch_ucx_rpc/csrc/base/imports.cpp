#include "base/imports.h"

#include <elf.h>
#include <link.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <unordered_map>

namespace torch_ucx_rpc {

namespace {

#if defined(__x86_64__)
constexpr uint64_t kCallSlot = R_X86_64_JUMP_SLOT, kDataSlot = R_X86_64_GLOB_DAT;
#elif defined(__aarch64__)
constexpr uint64_t kCallSlot = R_AARCH64_JUMP_SLOT, kDataSlot = R_AARCH64_GLOB_DAT;
#else
constexpr uint64_t kCallSlot = ~uint64_t{0}, kDataSlot = ~uint64_t{0}; // replaceImports() replaces nothing
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

// The loader may have made the slot's page read-only after it had filled the slot.
bool overwrite(void** slot, void* value, bool isReadOnly) {
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  void* const start = reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(slot) / page * page);
  if (isReadOnly && mprotect(start, page, PROT_READ | PROT_WRITE) != 0) {
    return false;
  }
  __atomic_store_n(slot, value, __ATOMIC_RELEASE); // other threads may be calling through the slot
  if (isReadOnly) {
    (void)mprotect(start, page, PROT_READ);
  }
  return true;
}

// The loader's data of a library.
class Library {
 public:
  explicit Library(const dl_phdr_info& info) : base_(info.dlpi_addr) {
    for (const ElfW(Phdr) & segment : std::span(info.dlpi_phdr, info.dlpi_phnum)) {
      if (segment.p_type == PT_DYNAMIC) {
        const auto* entry = reinterpret_cast<const ElfW(Dyn)*>(base_ + segment.p_vaddr);
        for (; entry->d_tag != DT_NULL; ++entry) {
          dynamic_[entry->d_tag] = entry->d_un.d_val;
        }
      } else if (segment.p_type == PT_GNU_RELRO) {
        readOnlyFrom_ = base_ + segment.p_vaddr;
        readOnlyTo_ = readOnlyFrom_ + segment.p_memsz;
      }
    }
    symbols_ = tableAt<ElfW(Sym)>(DT_SYMTAB);
    names_ = tableAt<char>(DT_STRTAB);
    versions_ = tableAt<uint16_t>(DT_VERSYM);
  }

  void replace(std::span<Import> imports) const {
    if (symbols_ != nullptr && names_ != nullptr) { // else there are no names to look for
      replaceIn(slotsAt(DT_JMPREL, DT_PLTRELSZ), imports);
      const std::span<const ElfW(Rela)> slots = slotsAt(DT_RELA, DT_RELASZ);
      replaceIn(slots.subspan(std::min(valueOf(DT_RELACOUNT), slots.size())), imports); // the first ones have no symbol
    }
  }

 private:
  uint64_t valueOf(int64_t tag) const {
    const auto found = dynamic_.find(tag);
    return found != dynamic_.end() ? found->second : 0;
  }

  // Null where the library has no such table.
  template <typename Entry>
  const Entry* tableAt(int64_t tag) const {
    // glibc has turned these offsets into addresses. Other loaders leave them as offsets.
    const uint64_t value = valueOf(tag);
    return value == 0 ? nullptr : reinterpret_cast<const Entry*>(value < base_ ? base_ + value : value);
  }

  std::span<const ElfW(Rela)> slotsAt(int64_t tag, int64_t tagOfBytes) const {
    const auto* const slots = tableAt<ElfW(Rela)>(tag);
    return {slots, slots != nullptr ? valueOf(tagOfBytes) / sizeof(ElfW(Rela)) : 0};
  }

  // libc's symbols have a version. Most of torch's 40,000 imports have none. This test saves the 3 ms that reading
  // their names takes.
  bool mayBeOfLibc(size_t symbol) const {
    constexpr uint16_t kHidden = 0x8000;
    return versions_ == nullptr || (versions_[symbol] & ~kHidden) > VER_NDX_GLOBAL;
  }

  void replaceIn(std::span<const ElfW(Rela)> slots, std::span<Import> imports) const {
    for (const ElfW(Rela) & one : slots) {
      const uint64_t type = ELF64_R_TYPE(one.r_info);
      const size_t symbol = ELF64_R_SYM(one.r_info);
      if ((type != kCallSlot && type != kDataSlot) || !mayBeOfLibc(symbol)) {
        continue;
      }
      const char* const name = names_ + symbols_[symbol].st_name;
      for (Import& import : imports) {
        if (std::strcmp(name, import.name) == 0) {
          const uintptr_t slot = base_ + one.r_offset;
          const bool isReadOnly = slot >= readOnlyFrom_ && slot < readOnlyTo_;
          import.isReplaced |= overwrite(reinterpret_cast<void**>(slot), import.replacement, isReadOnly);
        }
      }
    }
  }

  const uintptr_t base_;
  uintptr_t readOnlyFrom_ = 0; // made read-only by the loader
  uintptr_t readOnlyTo_ = 0;
  std::unordered_map<int64_t, uint64_t> dynamic_; // the entries of its dynamic section, by tag
  const ElfW(Sym) * symbols_;
  const char* names_;
  const uint16_t* versions_; // by symbol; null in a library without versions
};

int replaceInLibrary(dl_phdr_info* info, size_t /*size*/, void* context) {
  Imports& imports = *static_cast<Imports*>(context);
  if (!contains(*info, imports.ofTheLibrary)) {
    return 0;
  }
  Library(*info).replace(imports.all);
  return 1;
}

} // namespace

bool replaceImports(const void* ofTheLibrary, std::span<Import> imports) {
  Imports wanted{ofTheLibrary, imports};
  (void)dl_iterate_phdr(&replaceInLibrary, &wanted);
  return std::ranges::all_of(imports, &Import::isReplaced);
}

} // namespace torch_ucx_rpc
