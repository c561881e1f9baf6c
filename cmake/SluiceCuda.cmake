# Decides whether gpu/ is built, and how nvcc is called. Sets SLUICE_WITH_CUDA.
#
# CMAKE_CUDA_ARCHITECTURES defaults to CMake's environment variable CUDAARCHS, else to Hopper alone, which keeps a build
# short; the preset cuda-all builds for all that are supported. 90a rather than 90: the kernels use instructions that only the former has.
set(SLUICE_WITH_CUDA OFF)
if(NOT SLUICE_CUDA STREQUAL "OFF")
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    set(SLUICE_WITH_CUDA ON)
  elseif(NOT SLUICE_CUDA STREQUAL "AUTO")
    message(FATAL_ERROR "SLUICE_CUDA is ${SLUICE_CUDA} but nvcc was not found; put it on PATH, set "
      "CMAKE_CUDA_COMPILER, or configure with SLUICE_CUDA=OFF")
  endif()
endif()

if(SLUICE_WITH_CUDA)
  # OFF is an answer, too: then CMAKE_CUDA_FLAGS says what to generate, as preset ampere-paths does.
  if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES AND NOT DEFINED ENV{CUDAARCHS})
    set(CMAKE_CUDA_ARCHITECTURES 90a CACHE STRING "GPU architectures")
  endif()
  enable_language(CUDA)
  if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 13.0 AND SLUICE_CUDA STREQUAL "AUTO")
    message(STATUS "nvcc ${CMAKE_CUDA_COMPILER_VERSION} is too old for the CUDA device; CUDA 13.0 or newer has what it needs")
    set(SLUICE_WITH_CUDA OFF)
  elseif(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 13.0)
    message(FATAL_ERROR "nvcc ${CMAKE_CUDA_COMPILER_VERSION} is too old; install CUDA 13.0 or newer, or configure "
      "with SLUICE_CUDA=OFF")
  endif()
endif()
if(SLUICE_WITH_CUDA)
  if(CCACHE AND NOT CMAKE_CUDA_COMPILER_LAUNCHER)
    set(CMAKE_CUDA_COMPILER_LAUNCHER ${ccache_launcher})
  endif()
  find_package(CUDAToolkit REQUIRED)
endif()
message(STATUS "CUDA device: ${SLUICE_WITH_CUDA}")
