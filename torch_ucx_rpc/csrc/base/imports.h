#pragma once

#include <span>

namespace torch_ucx_rpc {

// A function of libc that a library imports, and its replacement.
struct Import {
  const char* name;
  void* replacement;
  bool isReplaced = false;
};

// Replaces functions that one library of this process imports, in the loader's table. The functions of other libraries
// stay as they are. `ofTheLibrary` is any function of that one library. Returns true if each import was replaced.
// Thread-safe: other threads may be calling the functions.
bool replaceImports(const void* ofTheLibrary, std::span<Import> imports);

} // namespace torch_ucx_rpc
