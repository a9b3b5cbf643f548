# Choice of the CUDA backend: sets FERRY_WITH_CUDA. It needs nvcc, the headers and the static runtime. Nothing links
# libcuda, so the build also runs where there is no driver.
set(FERRY_WITH_CUDA OFF)
if(FERRY_CUDA STREQUAL "AUTO")
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    set(FERRY_WITH_CUDA ON)
  endif()
elseif(FERRY_CUDA)
  set(FERRY_WITH_CUDA ON)
endif()
if(NOT FERRY_WITH_CUDA)
  return()
endif()

if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES 90a CACHE STRING "GPU architectures, e.g. 80;90a;100;120")
endif()
enable_language(CUDA)
find_package(CUDAToolkit 12.8 REQUIRED)

# Options of every kernel. C++20 is spelled out because CMake 3.25 does not know that nvcc has it. Sums are specified
# operation by operation, so the compiler fuses no multiply-add that the source does not ask for; extended-lambda and
# fast-math stay off for the same reason.
add_library(ferry_kernel_options INTERFACE)
target_compile_options(ferry_kernel_options INTERFACE $<$<COMPILE_LANGUAGE:CUDA>:-std=c++20;-fmad=false;-lineinfo>)
if(FERRY_WERROR)
  target_compile_options(ferry_kernel_options INTERFACE $<$<COMPILE_LANGUAGE:CUDA>:-Werror=all-warnings>)
endif()
