# GoogleTest is not on PyPI. An installed one is used; else Debian's package is unpacked into the build folder,
# which needs no root: with the machine's package lists, or with lists of our own when it has none.
find_package(GTest QUIET)

if(NOT GTest_FOUND)
  find_program(APT_GET apt-get NO_CACHE)
  find_program(DPKG_DEB dpkg-deb NO_CACHE)
  set(download "${CMAKE_BINARY_DIR}/googletest")
  file(GLOB package "${download}/libgtest-dev_*.deb")
  if(APT_GET AND DPKG_DEB AND NOT package)
    message(STATUS "GoogleTest is not installed: downloading Debian's libgtest-dev into ${download}")
    file(MAKE_DIRECTORY "${download}/state/lists/partial" "${download}/cache/archives/partial")
    set(apt "'${APT_GET}' -q")
    set(apt_own_lists "${apt} -o 'Dir::State=${download}/state' -o 'Dir::Cache=${download}/cache' -o APT::Sandbox::User=")
    foreach(attempt IN ITEMS
        "${apt} download libgtest-dev"
        "${apt_own_lists} update && ${apt_own_lists} download libgtest-dev")
      execute_process(COMMAND sh -c "${attempt}" WORKING_DIRECTORY "${download}" OUTPUT_QUIET ERROR_QUIET)
      file(GLOB package "${download}/libgtest-dev_*.deb")
      if(package)
        break()
      endif()
    endforeach()
  endif()
  if(package)
    list(GET package 0 package)
    execute_process(COMMAND "${DPKG_DEB}" -x "${package}" "${download}/root" COMMAND_ERROR_IS_FATAL ANY)
    find_package(GTest QUIET PATHS "${download}/root/usr" NO_DEFAULT_PATH)
  endif()
endif()

if(NOT GTest_FOUND)
  message(FATAL_ERROR
    "torch_ucx_rpc: the C++ tests need GoogleTest: install it (Debian, Ubuntu: apt install libgtest-dev; "
    "conda install -c conda-forge gtest), or name one that is elsewhere: cmake -DGTest_ROOT=<prefix>.")
endif()
