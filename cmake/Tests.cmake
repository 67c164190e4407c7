# One GoogleTest executable for each tests/cpp/<layer>/<name>_test.cpp, which is one test of ctest. A process for each
# test would load torch's libraries a thousand times.
include(cmake/GoogleTest.cmake)
enable_testing()
# All of them, without the extension; and those that use nothing of torch's, which are compiled in a fraction of the time.
add_custom_target(cpp_tests)
add_custom_target(light_cpp_tests)

if(TORCH_UCX_RPC_SANITIZE)
  add_library(sanitizers OBJECT "${CMAKE_SOURCE_DIR}/tests/cpp/support/sanitizers.cpp")
  link_libraries(sanitizers)
endif()

set(precompiled torch_ucx_rpc_agent)
if(NOT TORCH_UCX_RPC_SANITIZE)
  # A test runs for a moment: optimizing it would take longer. The precompiled header must be of the same flags.
  add_compile_options(-O0)
  set(precompiled heavy_headers)
  file(CONFIGURE OUTPUT "${CMAKE_BINARY_DIR}/heavy_headers.cpp" CONTENT "")
  add_library(heavy_headers OBJECT "${CMAKE_BINARY_DIR}/heavy_headers.cpp")
  target_link_libraries(heavy_headers PRIVATE torch_ucx_rpc_agent GTest::gtest_main)
  get_target_property(headers torch_ucx_rpc_agent PRECOMPILE_HEADERS)
  target_precompile_headers(heavy_headers PRIVATE
    ${headers} <ATen/ATen.h> <torch/csrc/distributed/rpc/utils.h> <gtest/gtest.h>)
endif()

function(add_gtest name)
  add_test(NAME ${name} COMMAND ${name})
  set_tests_properties(${name} PROPERTIES TIMEOUT 300)
endfunction()

# The fake of csrc/transport.
add_library(loopback STATIC "${CMAKE_SOURCE_DIR}/tests/cpp/support/loopback_transport.cpp")
target_include_directories(loopback PUBLIC "${CMAKE_SOURCE_DIR}/tests/cpp/support")
target_link_libraries(loopback PUBLIC torch_ucx_rpc_core)

file(GLOB tests CONFIGURE_DEPENDS "${CMAKE_SOURCE_DIR}/tests/cpp/*/*_test.cpp")
foreach(source IN LISTS tests)
  cmake_path(GET source STEM name)
  add_executable(${name} "${source}")
  target_link_libraries(${name} PRIVATE loopback torch_ucx_rpc_ucp GTest::gtest_main)
  # A test that uses nothing of torch's big libraries does not wait for them at its start.
  target_link_options(${name} PRIVATE -Wl,--as-needed)
  set_target_properties(${name} PROPERTIES
    RUNTIME_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}/tests"
    BUILD_RPATH "${TORCH_LIBRARY_DIRS};${UCX_LIBRARY_DIR}")
  file(STRINGS "${source}" heavy REGEX "#include (\"(rpc/|tensors/|torch_glue/|agent_fixture|device_fixture)|\"sealed_job|<torch/)" LIMIT_COUNT 1)
  set(label light)
  if(heavy)
    set(label heavy)
    target_link_libraries(${name} PRIVATE torch_ucx_rpc_agent)
    # A precompiled header serves again where the flags are the same, -fPIC included.
    target_compile_options(${name} PRIVATE -fPIC)
    target_precompile_headers(${name} REUSE_FROM ${precompiled})
  else()
    add_dependencies(light_cpp_tests ${name})
  endif()
  add_dependencies(cpp_tests ${name})
  target_compile_definitions(${name} PRIVATE TORCH_UCX_RPC_FUZZ_CORPUS="${CMAKE_SOURCE_DIR}/tests/fuzz/corpus")
  add_gtest(${name})
  set_tests_properties(${name} PROPERTIES LABELS ${label})
endforeach()
# Thousands of random schedules pay for optimization.
set_source_files_properties("${CMAKE_SOURCE_DIR}/tests/cpp/peers/barrier_schedule_test.cpp"
  "${CMAKE_SOURCE_DIR}/tests/cpp/messaging/resumption_test.cpp" PROPERTIES COMPILE_OPTIONS -O1)

# The process that stranger_test runs, found beside it.
add_executable(stranger "${CMAKE_SOURCE_DIR}/tests/cpp/support/stranger.cpp")
add_dependencies(cpp_tests stranger)
add_dependencies(light_cpp_tests stranger)
target_link_libraries(stranger PRIVATE torch_ucx_rpc_ucp)
target_link_options(stranger PRIVATE -Wl,--as-needed)
set_target_properties(stranger PROPERTIES
  RUNTIME_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}/tests"
  BUILD_RPATH "${TORCH_LIBRARY_DIRS};${UCX_LIBRARY_DIR}")

# UCX with device memory, on a driver without a GPU: where this UCX has CUDA transports, and is one that the tests
# describe. UCX puts jumps at the beginning of the driver's functions, and understands no other beginning than that of
# unoptimized code.
if(EXISTS "${UCX_LIBRARY_DIR}/ucx/libuct_cuda.so.0" AND UCX_VERSION VERSION_GREATER_EQUAL 1.22 AND NOT TORCH_UCX_RPC_SANITIZE)
  foreach(name IN ITEMS cuda nvidia-ml)
    string(REPLACE "nvidia-ml" "nvml" source ${name})
    add_library(stub_${source} SHARED "${CMAKE_SOURCE_DIR}/tests/cuda_stub/${source}.cpp")
    target_compile_options(stub_${source} PRIVATE -O0 -fno-omit-frame-pointer)
    set_target_properties(stub_${source} PROPERTIES
      OUTPUT_NAME ${name} SOVERSION 1 CXX_VISIBILITY_PRESET default
      # Each by itself: the loader must not find the other one, which some tests do without.
      LIBRARY_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}/cuda_stub/${source}")
  endforeach()
  target_link_libraries(stub_cuda PRIVATE Threads::Threads)

  foreach(name IN ITEMS device_lanes_test device_agents_test)
    add_executable(${name} "${CMAKE_SOURCE_DIR}/tests/cuda_stub/${name}.cpp")
    target_link_libraries(${name} PRIVATE torch_ucx_rpc_ucp stub_cuda GTest::gtest_main)
    target_link_options(${name} PRIVATE -Wl,--as-needed)
    target_compile_definitions(${name} PRIVATE CUDA_STUB_NVML="$<TARGET_SONAME_FILE:stub_nvml>")
    set_target_properties(${name} PROPERTIES
      RUNTIME_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}/tests"
      BUILD_RPATH "${TORCH_LIBRARY_DIRS};${UCX_LIBRARY_DIR}")
    add_dependencies(${name} stub_nvml)
    add_dependencies(cpp_tests ${name})
  endforeach()
  target_link_libraries(device_agents_test PRIVATE torch_ucx_rpc_agent)
  target_include_directories(device_agents_test PRIVATE "${CMAKE_SOURCE_DIR}/tests/cpp/support")
  target_compile_options(device_agents_test PRIVATE -fPIC)
  target_precompile_headers(device_agents_test REUSE_FROM ${precompiled})
  add_gtest(device_lanes_test)
  add_gtest(device_agents_test)
  # The longest begins first.
  set_tests_properties(device_agents_test PROPERTIES COST 1)

  # Compares the sources with cuda.h, where there is one: of a CUDA toolkit, or of the wheels beside torch.
  find_path(CUDA_HEADER_FOLDER cuda.h PATHS /usr/local/cuda/include "${Python_SITELIB}/nvidia/cu13/include" NO_CACHE)
  if(CUDA_HEADER_FOLDER)
    add_library(cuda_header_check OBJECT "${CMAKE_SOURCE_DIR}/tests/cuda_stub/cuda_header_check.cpp")
    target_include_directories(cuda_header_check PRIVATE "${csrc}")
    target_include_directories(cuda_header_check SYSTEM PRIVATE "${CUDA_HEADER_FOLDER}")
    add_dependencies(cpp_tests cuda_header_check)
  else()
    message(STATUS "There is no cuda.h, with which the numbers of cuda_stub would be compared")
  endif()
endif()
