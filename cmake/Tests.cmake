# One GoogleTest executable for each tests/cpp/<layer>/<name>_test.cpp, its tests known to ctest one by one.
include(cmake/GoogleTest.cmake)
enable_testing()
# All of them, without the extension.
add_custom_target(cpp_tests)

if(TORCH_UCX_RPC_SANITIZE)
  add_library(sanitizers OBJECT "${CMAKE_SOURCE_DIR}/tests/cpp/support/sanitizers.cpp")
  link_libraries(sanitizers)
endif()

file(GLOB tests CONFIGURE_DEPENDS "${CMAKE_SOURCE_DIR}/tests/cpp/*/*_test.cpp")
foreach(source IN LISTS tests)
  cmake_path(GET source STEM name)
  add_executable(${name} "${source}")
  target_include_directories(${name} PRIVATE "${CMAKE_SOURCE_DIR}/tests/cpp/support")
  target_link_libraries(${name} PRIVATE torch_ucx_rpc_agent torch_ucx_rpc_ucp GTest::gtest_main)
  # A test that uses nothing of torch's big libraries does not wait for them at its start.
  target_link_options(${name} PRIVATE -Wl,--as-needed)
  set_target_properties(${name} PROPERTIES
    RUNTIME_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}/tests"
    BUILD_RPATH "${TORCH_LIBRARY_DIRS};${UCX_LIBRARY_DIR}")
  file(STRINGS "${source}" heavy REGEX "#include (\"(rpc/|tensors/|torch_glue/|agent_fixture|device_fixture)|\"sealed_job|<torch/)" LIMIT_COUNT 1)
  if(heavy)
    # The agent's precompiled header serves again where the flags are the same, -fPIC included.
    target_compile_options(${name} PRIVATE -fPIC)
    target_precompile_headers(${name} REUSE_FROM torch_ucx_rpc_agent)
  endif()
  add_dependencies(cpp_tests ${name})
  target_compile_definitions(${name} PRIVATE TORCH_UCX_RPC_FUZZ_CORPUS="${CMAKE_SOURCE_DIR}/tests/fuzz/corpus")
  gtest_discover_tests(${name} TEST_PREFIX "${name}." PROPERTIES TIMEOUT 120 DISCOVERY_TIMEOUT 300)
endforeach()

# The process that stranger_test runs, found beside it.
add_executable(stranger "${CMAKE_SOURCE_DIR}/tests/cpp/support/stranger.cpp")
add_dependencies(cpp_tests stranger)
target_link_libraries(stranger PRIVATE torch_ucx_rpc_ucp)
target_link_options(stranger PRIVATE -Wl,--as-needed)
set_target_properties(stranger PROPERTIES
  RUNTIME_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}/tests"
  BUILD_RPATH "${TORCH_LIBRARY_DIRS};${UCX_LIBRARY_DIR}")
