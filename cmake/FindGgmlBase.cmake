# FindGgmlBase - ggml's base library (gguf.h, ggml.h), without its backends.
#
# Its own package is asked first (ggml_DIR, CMAKE_PREFIX_PATH), then the user
# cache that scripts/bootstrap fills; there the package lies in lib64, which
# CMake does not search on Debian.
#
# Defines: GgmlBase_FOUND, GgmlBase_VERSION. Target: Ggml::base

cmake_policy(VERSION 3.25)

include("${CMAKE_CURRENT_LIST_DIR}/LibTorchRoot.cmake")  # kvcache_cache_dir
include(FindPackageHandleStandardArgs)

kvcache_cache_dir(_cache)
file(GLOB _folders "${_cache}/ggml-*/libggml/lib64/cmake/ggml")
list(SORT _folders COMPARE NATURAL ORDER DESCENDING)
find_package(ggml CONFIG QUIET)
if(NOT ggml_FOUND)
  find_package(ggml CONFIG QUIET PATHS ${_folders} NO_DEFAULT_PATH)
endif()
if(TARGET ggml::ggml-base)
  set(GgmlBase_VERSION "${ggml_VERSION}")
  get_target_property(GgmlBase_INCLUDE_DIR ggml::ggml-base INTERFACE_INCLUDE_DIRECTORIES)
endif()
find_package_handle_standard_args(GgmlBase
  REQUIRED_VARS GgmlBase_INCLUDE_DIR VERSION_VAR GgmlBase_VERSION
  REASON_FAILURE_MESSAGE "no ggml here. Run scripts/bootstrap, or set ggml_DIR to the folder of its ggml-config.cmake.")
if(GgmlBase_FOUND AND NOT TARGET Ggml::base)
  add_library(Ggml::base INTERFACE IMPORTED)
  target_link_libraries(Ggml::base INTERFACE ggml::ggml-base)
endif()
unset(_cache)
unset(_folders)
