# cmake --install: headers, libraries and the package that find_package(kvcache)
# reads. Components: core (LibTorch only), model, chat.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)
set(package_dir "${CMAKE_INSTALL_LIBDIR}/cmake/kvcache")

set(components core)
install(TARGETS kvcache EXPORT kvcacheCoreTargets)
install(DIRECTORY include/kvcache DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}"
  FILES_MATCHING PATTERN "*.h" PATTERN model EXCLUDE)
if(TARGET kvcache_model)
  list(APPEND components model)
  install(TARGETS kvcache_model EXPORT kvcacheModelTargets)
  install(DIRECTORY include/kvcache/model DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}/kvcache"
    FILES_MATCHING PATTERN "*.h")
endif()
if(TARGET kvcache_chat)
  list(APPEND components chat)
  set_target_properties(kvcache_chat PROPERTIES EXPORT_NAME chat)
  install(TARGETS kvcache_chat EXPORT kvcacheChatTargets)
endif()
if(TARGET kvcache_cli)
  install(TARGETS kvcache_cli RUNTIME)
endif()

foreach(component ${components})
  string(SUBSTRING ${component} 0 1 first)
  string(TOUPPER ${first} first)
  string(SUBSTRING ${component} 1 -1 rest)
  install(EXPORT kvcache${first}${rest}Targets NAMESPACE kvcache::
    FILE kvcache-${component}.cmake DESTINATION "${package_dir}")
endforeach()

string(REGEX MATCH "^[0-9]+\\.[0-9]+" LibTorch_RELEASE "${LibTorch_VERSION}")
set(has_sentencepiece FALSE)
if(TARGET PkgConfig::SENTENCEPIECE)
  set(has_sentencepiece TRUE)
endif()
configure_package_config_file(cmake/kvcacheConfig.cmake.in kvcacheConfig.cmake
  INSTALL_DESTINATION "${package_dir}")
# Before 1.0 a minor release may change the interface.
write_basic_package_version_file(kvcacheConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES
  "${PROJECT_BINARY_DIR}/kvcacheConfig.cmake"
  "${PROJECT_BINARY_DIR}/kvcacheConfigVersion.cmake"
  cmake/LibTorchRoot.cmake cmake/FindLibTorch.cmake cmake/FindGgmlBase.cmake
  cmake/ModelDependencies.cmake
  DESTINATION "${package_dir}")
install(FILES LICENSE DESTINATION "${CMAKE_INSTALL_DOCDIR}")
if(TARGET kvcache_chat)  # its archive holds the template engine
  install(FILES third_party/jinja/LICENSE
    DESTINATION "${CMAKE_INSTALL_DOCDIR}" RENAME LICENSE.jinja)
endif()
