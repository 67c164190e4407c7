// How sanitizers behave in the C++ tests: part of every test, so that it is the same by hand, in ctest and in a debugger. Only
// builds with TORCH_UCX_RPC_SANITIZE have it (cmake/Tests.cmake).

#define RUNTIME_READS extern "C" __attribute__((visibility("default"))) const char*

// NOLINTBEGIN(bugprone-reserved-identifier): the names are the sanitizers' own

RUNTIME_READS __asan_default_options() {
  // Memory that cannot be had is one of the tests: it is to be refused as malloc refuses it.
  return "allocator_may_return_null=1:detect_stack_use_after_return=1:check_initialization_order=1:strict_string_checks=1";
}

RUNTIME_READS __ubsan_default_options() {
  return "print_stacktrace=1";
}

RUNTIME_READS __tsan_default_options() {
  return "allocator_may_return_null=1:second_deadlock_stack=1:history_size=4";
}

RUNTIME_READS __tsan_default_suppressions() {
  // The last reference to a tensor is often dropped within torch's libraries. They are not instrumented, so that ThreadSanitizer
  // does not see how their count of references orders that after what others did with theirs:
  // https://clang.llvm.org/docs/ThreadSanitizer.html#limitations
  return "race:c10::TensorImpl::~TensorImpl\n";
}

// NOLINTEND(bugprone-reserved-identifier)
