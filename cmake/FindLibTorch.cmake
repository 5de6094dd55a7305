# FindLibTorch - LibTorch's CPU half as imported targets, without CUDA.
#
# find_package(Torch) of a CUDA wheel insists on nvcc and links the CUDA half.
# A CPU program needs only libtorch_cpu and libc10 (plus two small runtime
# libraries that libtorch_cpu names), so they are imported here by path.
#
# Looks in, first match wins: LibTorch_ROOT, Torch_DIR, CMAKE_PREFIX_PATH, the
# active Python's torch, the user cache that scripts/bootstrap fills.
#
# Defines: LibTorch::cpu, LibTorch_VERSION, LibTorch_ROOT_DIR.

set(_roots ${LibTorch_ROOT} $ENV{LibTorch_ROOT})
if(Torch_DIR)
  get_filename_component(_r "${Torch_DIR}/../../.." ABSOLUTE)
  list(APPEND _roots "${_r}")
endif()
list(APPEND _roots ${CMAKE_PREFIX_PATH})
if(DEFINED ENV{KVCACHE_CACHE_DIR})
  set(_cache "$ENV{KVCACHE_CACHE_DIR}")
elseif(DEFINED ENV{XDG_CACHE_HOME})
  set(_cache "$ENV{XDG_CACHE_HOME}/kvcache")
else()
  set(_cache "$ENV{HOME}/.cache/kvcache")
endif()
list(APPEND _roots "${_cache}/libtorch-2.15.0/torch")

find_path(LibTorch_INCLUDE_DIR ATen/core/Tensor.h
  HINTS ${_roots} PATH_SUFFIXES include NO_DEFAULT_PATH)
get_filename_component(LibTorch_ROOT_DIR "${LibTorch_INCLUDE_DIR}/.." ABSOLUTE)
find_library(LibTorch_CPU_LIBRARY torch_cpu HINTS "${LibTorch_ROOT_DIR}/lib" NO_DEFAULT_PATH)
find_library(LibTorch_C10_LIBRARY c10 HINTS "${LibTorch_ROOT_DIR}/lib" NO_DEFAULT_PATH)
if(EXISTS "${LibTorch_INCLUDE_DIR}/torch/headeronly/version.h")
  file(STRINGS "${LibTorch_INCLUDE_DIR}/torch/headeronly/version.h" _v
    REGEX "define TORCH_VERSION \"")
  string(REGEX MATCH "[0-9]+\\.[0-9]+\\.[0-9]+" LibTorch_VERSION "${_v}")
endif()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(LibTorch
  REQUIRED_VARS LibTorch_CPU_LIBRARY LibTorch_C10_LIBRARY LibTorch_INCLUDE_DIR
  VERSION_VAR LibTorch_VERSION)

if(LibTorch_FOUND AND NOT TARGET LibTorch::cpu)
  find_library(LibTorch_GOMP_LIBRARY NAMES gomp libgomp.so.1
    HINTS "${LibTorch_ROOT_DIR}/lib" NO_DEFAULT_PATH)
  add_library(LibTorch::c10 SHARED IMPORTED)
  set_target_properties(LibTorch::c10 PROPERTIES
    IMPORTED_LOCATION "${LibTorch_C10_LIBRARY}"
    INTERFACE_INCLUDE_DIRECTORIES "${LibTorch_INCLUDE_DIR}")
  add_library(LibTorch::cpu SHARED IMPORTED)
  set_target_properties(LibTorch::cpu PROPERTIES
    IMPORTED_LOCATION "${LibTorch_CPU_LIBRARY}"
    INTERFACE_INCLUDE_DIRECTORIES
      "${LibTorch_INCLUDE_DIR};${LibTorch_INCLUDE_DIR}/torch/csrc/api/include"
    INTERFACE_LINK_LIBRARIES "LibTorch::c10"
    INTERFACE_LINK_OPTIONS "-Wl,-rpath-link,/usr/local/cuda/lib64")
endif()
