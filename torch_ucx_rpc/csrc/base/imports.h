#pragma once

#include <span>

namespace torch_ucx_rpc {

// A function of libc that a library imports, and another one to take its place.
struct Import {
  const char* name;
  void* replacement;
  bool isReplaced = false;
};

// Replaces functions in the loader's table of what one library of this process imports, for that library alone. The
// library is the one that `ofTheLibrary`, a function, belongs to. True if its table has an entry for each of them.
// Thread-safe: other threads may be calling the functions.
bool replaceImports(const void* ofTheLibrary, std::span<Import> imports);

} // namespace torch_ucx_rpc
