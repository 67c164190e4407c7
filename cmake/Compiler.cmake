# Language, flags, sanitizers, ccache, and how many heavy compilations may run at once.

# NDEBUG as torch itself is built: some of its inline code differs without. -g1: backtraces have lines, and the
# module stays small.
set(optimization -O2)
if(TORCH_UCX_RPC_SANITIZE)
  # Stacks in reports keep their frames, and the instrumented files compile in half the time.
  set(optimization -O1)
endif()
set(CMAKE_CXX_FLAGS_RELEASE "${optimization} -g1 -DNDEBUG" CACHE STRING "Flags of a Release build")
if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "Release, Debug, RelWithDebInfo" FORCE)
endif()
enable_language(CXX)

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_CXX_SCAN_FOR_MODULES OFF)
set(CMAKE_CXX_VISIBILITY_PRESET hidden)
set(CMAKE_VISIBILITY_INLINES_HIDDEN ON)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
add_compile_options(-Wall -Wextra)
# Errors name the file they come from, but not where it was on the machine that built it.
add_compile_options("-fmacro-prefix-map=${CMAKE_SOURCE_DIR}/=")

if(TORCH_UCX_RPC_SANITIZE)
  set(sanitizers_address address,undefined)
  set(sanitizers_thread thread)
  set(sanitizers "${sanitizers_${TORCH_UCX_RPC_SANITIZE}}")
  if(NOT sanitizers)
    message(FATAL_ERROR "torch_ucx_rpc: TORCH_UCX_RPC_SANITIZE is address or thread, not ${TORCH_UCX_RPC_SANITIZE}.")
  endif()
  # The check of vptrs opens a pipe to find out whether an object is readable. Tests of a full file table have no file
  # for it.
  add_compile_options(-fsanitize=${sanitizers} -fno-sanitize=vptr -fno-sanitize-recover=all -fno-omit-frame-pointer)
  add_link_options(-fsanitize=${sanitizers})
  # libstdc++ checks indexes, iterators and preconditions; it changes no layout that torch's libraries share.
  add_compile_definitions(_GLIBCXX_ASSERTIONS)
  # Functions that need the worker lock look whether their thread has it (runtime/worker_mutex.h).
  add_compile_definitions(TORCH_UCX_RPC_CHECK_LOCKS)
  if(TORCH_UCX_RPC_SANITIZE STREQUAL thread AND CMAKE_CXX_COMPILER_ID STREQUAL GNU)
    # It does not follow fences, and GCC says so (https://gcc.gnu.org/onlinedocs/gcc/Warning-Options.html#index-Wtsan).
    # The fences there prevent missed wake-ups; the data has a mutex, which it does follow.
    set_source_files_properties("${CMAKE_SOURCE_DIR}/torch_ucx_rpc/csrc/runtime/progress.cpp" PROPERTIES COMPILE_OPTIONS -Wno-tsan)
  endif()
endif()

# A file with torch's headers takes up to 2 GiB to compile, and ninja starts one for each core.
cmake_host_system_information(RESULT memory_mib QUERY AVAILABLE_PHYSICAL_MEMORY)
math(EXPR compilations "${memory_mib} / 2048")
if(compilations LESS 1)
  set(compilations 1)
endif()
set_property(GLOBAL PROPERTY JOB_POOLS compilations=${compilations})
set(CMAKE_JOB_POOL_COMPILE compilations)

find_program(CCACHE ccache NO_CACHE)
if(CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  # Without these two, ccache passes by everything that uses a precompiled header.
  set(CMAKE_CXX_COMPILER_LAUNCHER
    "${CMAKE_COMMAND}" -E env CCACHE_SLOPPINESS=pch_defines,time_macros "${CCACHE}")
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    add_compile_options(-fpch-preprocess)
  endif()
endif()
