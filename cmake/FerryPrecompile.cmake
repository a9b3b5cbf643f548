# Headers that most files include, compiled once for each target: reading them takes longer than compiling most files.
# Each file still includes what it uses; clang-tidy reads the files without precompiled headers (scripts/lint.sh).
set(ferry_precompiled_headers
    <algorithm>
    <array>
    <atomic>
    <chrono>
    <cstddef>
    <cstdint>
    <cstring>
    <functional>
    <limits>
    <map>
    <memory>
    <mutex>
    <optional>
    <span>
    <string>
    <string_view>
    <thread>
    <utility>
    <vector>)

# ferry_precompile(target [header…]): precompiles the headers above and those given.
function(ferry_precompile target)
  if(FERRY_FAST_BUILD)
    target_precompile_headers(${target} PRIVATE ${ferry_precompiled_headers} ${ARGN})
  endif()
endfunction()

# ferry_compiles_together(target): allows groups of files that are compiled as one. Most of a small file's time goes
# into headers and templates that its neighbours use too. Eight files of src/core take 10.2 s one by one and 6.2 s as a
# group (GCC 12), with the address sanitizer 29.7 s and 14.0 s.
function(ferry_compiles_together target)
  set_target_properties(${target} PROPERTIES UNITY_BUILD ${FERRY_FAST_BUILD} UNITY_BUILD_MODE GROUP)
endfunction()

# ferry_together(group file…): groups files of such a target, in the folder that defines it. Their helpers' names
# differ.
function(ferry_together group)
  set_source_files_properties(${ARGN} PROPERTIES UNITY_GROUP ${group})
endfunction()
