# The CUDA toolkit and the CUDA half of LibTorch, for KVCACHE_CUDA.
#
# find_package(Torch) would detect GPUs and copy its own flags into the CUDA
# language; the two libraries are imported by path instead, like the CPU half.
#
# Targets: LibTorch::c10_cuda, LibTorch::cuda

# Hopper unless told otherwise: code for it runs on nothing older.
if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES 90)
endif()
if(NOT CMAKE_CUDA_COMPILER AND "$ENV{CUDACXX}" STREQUAL "")
  find_program(KVCACHE_NVCC nvcc HINTS ENV CUDA_HOME ENV CUDA_PATH PATHS /usr/local/cuda
    PATH_SUFFIXES bin)
  if(NOT KVCACHE_NVCC)
    message(FATAL_ERROR "KVCACHE_CUDA needs nvcc of a CUDA 13 toolkit; put it on the PATH or set CUDA_HOME.")
  endif()
  set(CMAKE_CUDA_COMPILER "${KVCACHE_NVCC}")
endif()
# CMake before 3.26 does not know that nvcc has C++20.
if(CMAKE_VERSION VERSION_LESS 3.26)
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
  set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
endif()
# One CUDA runtime in the process: the one that LibTorch loads.
set(CMAKE_CUDA_RUNTIME_LIBRARY Shared)
enable_language(CUDA)
find_package(CUDAToolkit 13 REQUIRED)
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)

if(NOT EXISTS "${LibTorch_ROOT_DIR}/lib/libtorch_cuda.so")
  message(FATAL_ERROR "KVCACHE_CUDA needs the CUDA half of LibTorch, but ${LibTorch_ROOT_DIR}/lib has no libtorch_cuda.so.")
endif()

# libtorch_cuda's own libraries lie beside the torch package. The linker must
# look there before the toolkit, whose NCCL is too old for it.
file(GLOB folders "${LibTorch_ROOT_DIR}/../nvidia/*/lib")
foreach(name libnccl.so.2 libnvshmem_host.so.3 libcusparseLt.so.0 libcufile.so.0)
  find_file(KVCACHE_${name} ${name} PATHS ${folders} ${CUDAToolkit_LIBRARY_DIR} NO_DEFAULT_PATH)
  if(NOT KVCACHE_${name})
    message(FATAL_ERROR "libtorch_cuda needs ${name}; run scripts/bootstrap --cuda.")
  endif()
endforeach()

add_library(LibTorch::c10_cuda SHARED IMPORTED)
set_target_properties(LibTorch::c10_cuda PROPERTIES
  IMPORTED_LOCATION "${LibTorch_ROOT_DIR}/lib/libc10_cuda.so"
  INTERFACE_LINK_LIBRARIES "LibTorch::c10;CUDA::cudart")
add_library(LibTorch::cuda SHARED IMPORTED)
set_target_properties(LibTorch::cuda PROPERTIES
  IMPORTED_LOCATION "${LibTorch_ROOT_DIR}/lib/libtorch_cuda.so")
# Kept although a program calls it only through the dispatcher.
list(TRANSFORM folders PREPEND "LINKER:-rpath-link," OUTPUT_VARIABLE rpath_links)
target_link_options(LibTorch::cuda INTERFACE ${rpath_links}
  "LINKER:-rpath-link,${CUDAToolkit_LIBRARY_DIR}")
target_link_libraries(LibTorch::cuda INTERFACE LibTorch::c10_cuda LibTorch::cpu
  "-Wl,--push-state,--no-as-needed,${LibTorch_ROOT_DIR}/lib/libtorch_cuda.so,--pop-state")
