# FindLibTorch - LibTorch's CPU half as imported targets, without CUDA.
#
# find_package(Torch) of a CUDA wheel insists on nvcc and links the CUDA half. A
# CPU program needs only libtorch_cpu and libc10 (plus two small CUDA runtime
# libraries that libtorch_cpu names), so they are imported here by path.
# LibTorchRoot.cmake says where they are looked for. A target `torch` that
# already exists, from the user's own find_package(Torch), is used instead.
#
# In:      LibTorch_ROOT, Torch_DIR, CMAKE_PREFIX_PATH,
#          LibTorch_RELEASE  "2.15": accept this release only
#          LibTorch_HINTS    more folders, asked before the user cache
# Defines: LibTorch_FOUND, LibTorch_VERSION, LibTorch_ROOT_DIR,
#          LibTorch_NOT_FOUND_MESSAGE
# Targets: LibTorch::c10, LibTorch::cpu,
#          LibTorch::openmp  -fopenmp on the OpenMP runtime that libtorch_cpu loads

cmake_policy(VERSION 3.25)

include("${CMAKE_CURRENT_LIST_DIR}/LibTorchRoot.cmake")
include(FindPackageHandleStandardArgs)

if(TARGET torch AND NOT TARGET LibTorch::cpu)
  set(LibTorch_ROOT_DIR "${TORCH_INSTALL_PREFIX}")
  if(NOT LibTorch_ROOT_DIR)
    get_target_property(_location torch LOCATION)
    get_filename_component(LibTorch_ROOT_DIR "${_location}/../.." ABSOLUTE)
  endif()
elseif(NOT TARGET LibTorch::cpu)
  # An earlier answer stands until its folder goes, so that a shell with another
  # Python does not change a build folder's LibTorch behind its back.
  if(LibTorch_ROOT OR DEFINED ENV{LibTorch_ROOT} OR Torch_DIR OR DEFINED ENV{Torch_DIR}
     OR CMAKE_PREFIX_PATH OR DEFINED ENV{CMAKE_PREFIX_PATH}
     OR NOT EXISTS "${LibTorch_ROOT_DIR}/lib/libtorch_cpu.so")
    kvcache_libtorch_root("${KVCACHE_LIBTORCH_MINIMUM}" "${LibTorch_RELEASE}"
      "${LibTorch_HINTS}" _root)
    set(LibTorch_ROOT_DIR "${_root}" CACHE INTERNAL "Folder of the LibTorch in use")
  endif()
endif()

kvcache_libtorch_version("${LibTorch_ROOT_DIR}" LibTorch_VERSION)
set(_why "no LibTorch ${LibTorch_RELEASE} here. Run scripts/bootstrap, activate a Python that has torch, or set LibTorch_ROOT to a folder with include/ and lib/.")
if(LibTorch_VERSION AND LibTorch_RELEASE)
  string(REGEX MATCH "^[0-9]+\\.[0-9]+" _release "${LibTorch_VERSION}")
  if(NOT _release STREQUAL LibTorch_RELEASE)
    set(LibTorch_VERSION "")
    set(_why "${LibTorch_ROOT_DIR} holds LibTorch ${_release}, but ${LibTorch_RELEASE} is needed: releases share no C++ ABI.")
  endif()
endif()

# What libtorch_cpu names, by file name, beside libc10 and the system's own.
set(_openmp_name "")
set(_cuda_names "")
if(LibTorch_VERSION)
  execute_process(COMMAND "${CMAKE_READELF}" -d "${LibTorch_ROOT_DIR}/lib/libtorch_cpu.so"
    OUTPUT_VARIABLE _dynamic ERROR_QUIET)
  string(REGEX MATCH "lib(gomp|iomp|omp)[-0-9a-z]*\\.so[.0-9]*" _openmp_name "${_dynamic}")
  string(REGEX MATCHALL "lib(cudart|cupti)\\.so\\.[0-9]+" _cuda_names "${_dynamic}")
endif()

# libtorch_cpu of a CUDA wheel names libcudart and libcupti. They are linked by
# path, so that the loader finds them through the program's own run path.
kvcache_cache_dir(_cache)
set(_cuda_paths "")
foreach(_name ${_cuda_names})
  string(MAKE_C_IDENTIFIER "LibTorch_${_name}" _variable)
  file(GLOB _folders "${LibTorch_ROOT_DIR}/../nvidia/*/lib" "${_cache}/cuda-runtime-*/lib")
  find_library(${_variable} NAMES ${_name}
    HINTS ${_folders} ${CUDAToolkit_ROOT} ENV CUDAToolkit_ROOT ENV CUDA_HOME ENV CUDA_PATH
    PATHS /usr/local/cuda
    PATH_SUFFIXES lib64 lib extras/CUPTI/lib64 targets/x86_64-linux/lib)
  mark_as_advanced(${_variable})
  if(${_variable})
    list(APPEND _cuda_paths "${${_variable}}")
  else()
    set(_why "libtorch_cpu needs ${_name}. Run scripts/bootstrap, or set CUDAToolkit_ROOT to a CUDA toolkit that has it.")
    set(LibTorch_VERSION "")
  endif()
endforeach()

set(LibTorch_NOT_FOUND_MESSAGE "${_why}")
find_package_handle_standard_args(LibTorch
  REQUIRED_VARS LibTorch_ROOT_DIR LibTorch_VERSION
  VERSION_VAR LibTorch_VERSION
  REASON_FAILURE_MESSAGE "${_why}")

if(LibTorch_FOUND AND NOT TARGET LibTorch::cpu)
  set(_include "${LibTorch_ROOT_DIR}/include")
  if(TARGET torch)
    add_library(LibTorch::c10 INTERFACE IMPORTED)
    target_link_libraries(LibTorch::c10 INTERFACE torch)
    add_library(LibTorch::cpu INTERFACE IMPORTED)
    target_link_libraries(LibTorch::cpu INTERFACE torch)
    # torch brings the CUDA half, whose NCCL is newer than a toolkit's.
    file(GLOB _folders "${LibTorch_ROOT_DIR}/../nvidia/*/lib")
    list(TRANSFORM _folders PREPEND "LINKER:-rpath-link,")
    target_link_options(LibTorch::cpu INTERFACE ${_folders})
  else()
    add_library(LibTorch::c10 SHARED IMPORTED)
    set_target_properties(LibTorch::c10 PROPERTIES
      IMPORTED_LOCATION "${LibTorch_ROOT_DIR}/lib/libc10.so")
    add_library(LibTorch::cpu SHARED IMPORTED)
    set_target_properties(LibTorch::cpu PROPERTIES
      IMPORTED_LOCATION "${LibTorch_ROOT_DIR}/lib/libtorch_cpu.so"
      INTERFACE_LINK_LIBRARIES LibTorch::c10)
    # Kept although a program may call neither by name: operators are registered
    # by initialisers, and libtorch_cpu needs the runtime libraries itself.
    list(TRANSFORM _cuda_paths APPEND "," OUTPUT_VARIABLE _joined)
    list(JOIN _joined "" _joined)
    target_link_libraries(LibTorch::cpu INTERFACE
      "-Wl,--push-state,--no-as-needed,${LibTorch_ROOT_DIR}/lib/libtorch_cpu.so,${_joined}--pop-state"
      ${_cuda_paths})
  endif()
  foreach(_target LibTorch::c10 LibTorch::cpu)
    target_include_directories(${_target} SYSTEM INTERFACE
      "${_include}" "${_include}/torch/csrc/api/include")
  endforeach()

  # A second OpenMP runtime in one process means two thread pools that fight for
  # the cores, so the one that libtorch_cpu loads is linked by path. Clang has no
  # code generation for libgomp: its build runs the loops on one thread.
  add_library(LibTorch::openmp INTERFACE IMPORTED)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    target_compile_options(LibTorch::openmp INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-fopenmp>)
    if(_openmp_name AND EXISTS "${LibTorch_ROOT_DIR}/lib/${_openmp_name}")
      target_link_libraries(LibTorch::openmp INTERFACE "${LibTorch_ROOT_DIR}/lib/${_openmp_name}")
    else()
      target_link_options(LibTorch::openmp INTERFACE -fopenmp)
    endif()
  else()
    target_compile_options(LibTorch::openmp INTERFACE
      $<$<COMPILE_LANGUAGE:CXX>:-Wno-unknown-pragmas>)
  endif()
endif()
foreach(_name why release cache include target variable folders openmp_name cuda_names
    cuda_paths joined dynamic)
  unset(_${_name})
endforeach()
