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
