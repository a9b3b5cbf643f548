# Headers that most files include, compiled once for each target: reading them takes longer than compiling most of the files.
# Files still include what they use; the clang-tidy pass of scripts/lint.sh reads them without this.
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

# ferry_precompile(target [header…]): the headers above and those given.
function(ferry_precompile target)
  if(FERRY_FAST_BUILD)
    target_precompile_headers(${target} PRIVATE ${ferry_precompiled_headers} ${ARGN})
  endif()
endfunction()

# ferry_compiles_together(target): it may have groups of files that are compiled as one. Most of the time of a small file goes
# into headers and templates that its neighbours have, too: groups of up to eight save that (of src/core with GCC 12: 10.2 s
# of eight files become 6.2 s, with the address sanitizer 29.7 s become 14.0 s).
function(ferry_compiles_together target)
  set_target_properties(${target} PROPERTIES UNITY_BUILD ${FERRY_FAST_BUILD} UNITY_BUILD_MODE GROUP)
endfunction()

# ferry_together(group file…): files of such a target, named in the folder that makes it. Their helpers' names differ.
function(ferry_together group)
  set_source_files_properties(${ARGN} PROPERTIES UNITY_GROUP ${group})
endfunction()
