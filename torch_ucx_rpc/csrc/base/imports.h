#pragma once

#include <span>

namespace torch_ucx_rpc {

// A function of libc that a library imports, and its replacement.
struct Import {
  const char* name;
  void* replacement;
  bool isReplaced = false;
};

// Replaces functions that one library of this process imports, for that library alone, in the loader's table.
// `ofTheLibrary` is any function of that library. Returns true if each import was replaced. Thread-safe: other threads
// may be calling the functions.
bool replaceImports(const void* ofTheLibrary, std::span<Import> imports);

} // namespace torch_ucx_rpc
