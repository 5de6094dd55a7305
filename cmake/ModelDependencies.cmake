# What kvcache::model needs beyond kvcache::kvcache. The package ships this file
# too: an installed kvcache::model needs the same libraries.
#
# Targets: nlohmann_json::nlohmann_json, Ggml::base, PkgConfig::PCRE2,
#          PkgConfig::UTF8PROC, PkgConfig::SENTENCEPIECE, PkgConfig::XXHASH

cmake_policy(VERSION 3.25)

# Finds them all. Sets `out` to one line for each that is missing, with the part
# that needs it and how to get it. Without sentencepiece the rest works, so it is
# missed only where `sentencepiece` is true.
macro(kvcache_model_dependencies out sentencepiece)
  set(${out} "")
  find_package(nlohmann_json QUIET)
  if(NOT nlohmann_json_FOUND)
    list(APPEND ${out} "nlohmann_json (weights, tokenizer): apt-get install nlohmann-json3-dev")
  endif()
  find_package(GgmlBase QUIET)
  if(NOT GgmlBase_FOUND)
    list(APPEND ${out} "ggml-base (GGUF weights): scripts/bootstrap")
  endif()
  find_package(PkgConfig QUIET)
  if(NOT PkgConfig_FOUND)
    list(APPEND ${out} "pkg-config (to find the libraries of the tokenizer): apt-get install pkg-config")
  else()
    foreach(_dependency
        "PCRE2;libpcre2-8;libpcre2-dev;tokenizer"
        "UTF8PROC;libutf8proc;libutf8proc-dev;tokenizer"
        "XXHASH;libxxhash;libxxhash-dev;saved prefixes"
        "SENTENCEPIECE;sentencepiece;libsentencepiece-dev;SentencePiece models")
      list(POP_FRONT _dependency _prefix _module _package _part)
      pkg_check_modules(${_prefix} QUIET IMPORTED_TARGET GLOBAL ${_module})
      if(NOT TARGET PkgConfig::${_prefix} AND (NOT _prefix STREQUAL SENTENCEPIECE OR ${sentencepiece}))
        list(APPEND ${out} "${_module} (${_part}): apt-get install ${_package}")
      endif()
    endforeach()
  endif()
endmacro()
