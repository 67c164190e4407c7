// The settings of sanitizers in the C++ tests. They are compiled into every test, so that a test runs the same by hand,
// in ctest and in a debugger. Only builds with TORCH_UCX_RPC_SANITIZE have them (cmake/Tests.cmake).

#define RUNTIME_READS extern "C" __attribute__((visibility("default"))) const char*

// NOLINTBEGIN(bugprone-reserved-identifier): the names are the sanitizers' own

RUNTIME_READS __asan_default_options() {
  // One test asks for more memory than exists, and the sanitizer must refuse it as malloc does. Another test measures
  // memory, and by default the sanitizer keeps 256 MiB of freed memory.
  return "allocator_may_return_null=1:detect_stack_use_after_return=1:check_initialization_order=1:"
         "strict_string_checks=1:quarantine_size_mb=16";
}

RUNTIME_READS __lsan_default_suppressions() {
  // UCX 1.22 does not free its records of open receives when its worker is destroyed, and says so: "was not
  // returned to mpool",
  // https://github.com/openucx/ucx/blob/v1.22.0/src/ucs/datastruct/mpool.c
  // It also leaks 100 bytes where a neighbour's shared memory is gone: uct_mm_ep_t_init() does not destroy its table,
  // https://github.com/openucx/ucx/blob/v1.22.0/src/uct/sm/mm/base/mm_ep.c
  return "leak:ucs_calloc\nleak:uct_mm_ep_attach_remote_seg\n";
}

RUNTIME_READS __ubsan_default_options() {
  return "print_stacktrace=1";
}

RUNTIME_READS __tsan_default_options() {
  return "allocator_may_return_null=1:second_deadlock_stack=1:history_size=4";
}

RUNTIME_READS __tsan_default_suppressions() {
  // The last reference to a tensor is often dropped within torch's libraries, which are not instrumented. So
  // ThreadSanitizer does not see that the reference count orders this drop after all other uses of the tensor:
  // https://clang.llvm.org/docs/ThreadSanitizer.html#limitations
  return "race:c10::TensorImpl::~TensorImpl\n";
}

// NOLINTEND(bugprone-reserved-identifier)
