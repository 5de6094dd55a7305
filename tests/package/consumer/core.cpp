// core.cpp - a program outside the tree on kvcache::kvcache.

#include <cstdio>

#include "kvcache/version.h"

int main() {
  kvcache::check_libtorch();
  std::printf("kvcache on LibTorch %s\n",
              kvcache::loaded_libtorch_version().c_str());
}
