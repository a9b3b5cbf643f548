# Builds and runs the project in consumer/ as an outside user would: cmake -DWAY=… -DWORK_DIR=… … -P
# outside_project.cmake
#   find_package_shared  installs this build tree, then find_package and pkg-config
#   add_subdirectory     the sources as a part of the outside project, as a static library; then installs that library,
#                        and find_package and pkg-config again
cmake_minimum_required(VERSION 3.25)

# Unoptimised and without debug information, which takes a fifth of the compilation.
set(common -G "${GENERATOR}" "-DCMAKE_CXX_COMPILER=${CXX_COMPILER}" "-DCMAKE_C_COMPILER=${C_COMPILER}" -DCMAKE_BUILD_TYPE=Debug
           -DCMAKE_CXX_FLAGS_DEBUG=-O0)

function(run)
  list(JOIN ARGN " " command_line)
  message(STATUS "${command_line}")
  execute_process(COMMAND ${ARGN} COMMAND_ERROR_IS_FATAL ANY)
endfunction()

function(run_consumer program)
  execute_process(COMMAND "${program}" OUTPUT_VARIABLE output COMMAND_ECHO STDOUT COMMAND_ERROR_IS_FATAL ANY)
  if(NOT output STREQUAL "ok ${VERSION}\n")
    message(FATAL_ERROR "consumer printed '${output}', expected 'ok ${VERSION}'")
  endif()
endfunction()

function(build_and_run_consumer build_dir)
  run("${CMAKE_COMMAND}" -S "${CMAKE_CURRENT_LIST_DIR}/consumer" -B "${build_dir}" ${common} ${ARGN})
  run("${CMAKE_COMMAND}" --build "${build_dir}" --parallel)
  run_consumer("${build_dir}/consumer")
  run_consumer("${build_dir}/consumer_in_c")
endfunction()

# Builds as a Makefile would: the compiler with the flags that pkg-config prints.
function(build_and_run_with_pkg_config prefix)
  find_program(PKG_CONFIG pkg-config REQUIRED)
  file(GLOB_RECURSE pc_file "${prefix}/*/ferry.pc")
  cmake_path(GET pc_file PARENT_PATH pc_dir)
  set(pkg_config "${CMAKE_COMMAND}" -E env "PKG_CONFIG_PATH=${pc_dir}" "${PKG_CONFIG}")
  run(${pkg_config} "--exact-version=${VERSION}" ferry)
  foreach(part cflags libs)
    execute_process(COMMAND ${pkg_config} --${part} ferry OUTPUT_VARIABLE printed OUTPUT_STRIP_TRAILING_WHITESPACE
                    COMMAND_ERROR_IS_FATAL ANY)
    separate_arguments(${part} UNIX_COMMAND "${printed}")
  endforeach()
  cmake_path(GET pc_dir PARENT_PATH lib_dir)
  set(program "${WORK_DIR}/pkg_config_consumer")
  run("${CXX_COMPILER}" -std=c++20 ${cflags} "${CMAKE_CURRENT_LIST_DIR}/consumer/main.cpp" -o "${program}" ${libs}
      "-Wl,-rpath,${lib_dir}")
  run_consumer("${program}")
  run("${C_COMPILER}" -std=c99 ${cflags} "${CMAKE_CURRENT_LIST_DIR}/consumer/main.c" -o "${program}_in_c" ${libs}
      "-Wl,-rpath,${lib_dir}")
  run_consumer("${program}_in_c")
endfunction()

# Installs a build tree and moves the result: nothing in the package may depend on its original location.
function(install_and_move build_dir)
  run("${CMAKE_COMMAND}" --install "${build_dir}" --prefix "${WORK_DIR}/prefix")
  file(RENAME "${WORK_DIR}/prefix" "${WORK_DIR}/moved")
endfunction()

file(REMOVE_RECURSE "${WORK_DIR}")
if(WAY STREQUAL "find_package_shared")
  install_and_move("${FERRY_BUILD_DIR}")
elseif(WAY STREQUAL "add_subdirectory")
  build_and_run_consumer("${WORK_DIR}/part" "-DFERRY_SOURCE_DIR=${FERRY_SOURCE_DIR}" -DFERRY_INSTALL=ON
                         "-DFERRY_CUDA=${WITH_CUDA}")
  install_and_move("${WORK_DIR}/part")
else()
  message(FATAL_ERROR "WAY is '${WAY}'")
endif()

build_and_run_consumer("${WORK_DIR}/consumer" "-DCMAKE_PREFIX_PATH=${WORK_DIR}/moved" "-DWANTED_VERSION=${VERSION}")
build_and_run_with_pkg_config("${WORK_DIR}/moved")
if(EXISTS "${WORK_DIR}/moved/bin/ferry")
  run("${WORK_DIR}/moved/bin/ferry" --help)
endif()
