# Compiler options of every target of this project. None of them reaches users of the installed package.
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
if(PROJECT_IS_TOP_LEVEL AND NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "Release, Debug or RelWithDebInfo" FORCE)
endif()

add_library(ferry_build_options INTERFACE)
target_compile_features(ferry_build_options INTERFACE cxx_std_20)
# Sums are specified operation by operation, so compilers may neither reorder nor fuse them. These options follow
# CMAKE_CXX_FLAGS and override them. A fused operation that is wanted is named in the source.
target_compile_options(
  ferry_build_options INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra;-Wshadow;-Wconversion;-Wsign-conversion;-fno-fast-math;-ffp-contract=off>)
# GCC 13 wrongly reports overflows in {fmt} 9.1's big-number code, in every file that includes it. It warns after
# inlining, so it does not matter that {fmt} is a system header.
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_GREATER_EQUAL 13)
  target_compile_options(ferry_build_options INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Wno-array-bounds;-Wno-stringop-overflow>)
endif()
if(FERRY_WERROR)
  target_compile_options(ferry_build_options INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Werror>)
endif()

if(FERRY_SANITIZE STREQUAL "address")
  # Check vptr opens a pipe to look at an object, but some tests run out of file descriptors on purpose.
  set(sanitize_flags -fsanitize=address,undefined -fno-sanitize=vptr -fno-sanitize-recover=all -fno-omit-frame-pointer)
elseif(FERRY_SANITIZE STREQUAL "thread")
  # GCC warns that this sanitizer does not see fences. The only fence orders reads before a check that they were
  # allowed.
  set(sanitize_flags -fsanitize=thread -fno-omit-frame-pointer $<$<CXX_COMPILER_ID:GNU>:-Wno-tsan>)
elseif(FERRY_SANITIZE STREQUAL "fuzzer")
  if(NOT CMAKE_CXX_COMPILER_ID MATCHES "Clang")
    message(FATAL_ERROR "FERRY_SANITIZE=fuzzer needs clang++ (-DCMAKE_CXX_COMPILER=clang++): libFuzzer is a part of it")
  endif()
  set(sanitize_flags -fsanitize=fuzzer-no-link,address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer)
elseif(FERRY_SANITIZE)
  message(FATAL_ERROR "FERRY_SANITIZE is '${FERRY_SANITIZE}'; it takes address, thread, fuzzer or nothing")
endif()
if(sanitize_flags)
  target_compile_options(ferry_build_options INTERFACE $<$<COMPILE_LANGUAGE:CXX>:${sanitize_flags}>)
  target_link_options(ferry_build_options INTERFACE ${sanitize_flags})
  # A macro for tests, because compilers announce a sanitizer in different ways.
  string(TOUPPER "FERRY_SANITIZER_${FERRY_SANITIZE}" ferry_sanitizer)
  target_compile_definitions(ferry_build_options INTERFACE ${ferry_sanitizer})
  # libferry needs the C++ part of clang's sanitizers, which only clang++ links.
  set(ferry_c_linker LINKER_LANGUAGE CXX)
endif()

find_package(fmt REQUIRED)
add_library(ferry_fmt INTERFACE)
target_link_libraries(ferry_fmt INTERFACE $<IF:$<BOOL:${FERRY_FMT_HEADER_ONLY}>,fmt::fmt-header-only,fmt::fmt>)

# The log, header-only and with the {fmt} above: nothing to ship, and one file includes it.
find_package(spdlog QUIET)
if(NOT TARGET spdlog::spdlog_header_only)
  message(FATAL_ERROR "spdlog was not found: install libspdlog-dev (scripts/setup.sh build does), or set spdlog_DIR")
endif()
get_target_property(ferry_spdlog_include_dirs spdlog::spdlog_header_only INTERFACE_INCLUDE_DIRECTORIES)
add_library(ferry_spdlog INTERFACE)
target_include_directories(ferry_spdlog SYSTEM INTERFACE "${ferry_spdlog_include_dirs}")
