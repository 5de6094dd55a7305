// openmp_test.cpp - our parallel loops and LibTorch's share one OpenMP runtime.

#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <link.h>

#include <atomic>
#include <set>
#include <string>

namespace {

std::set<std::string> loaded_openmp_runtimes() {
  std::set<std::string> found;
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* data) {
        const std::string path = info->dlpi_name;
        const std::string name = path.substr(path.rfind('/') + 1);
        for (const char* runtime : {"libgomp", "libiomp", "libomp"}) {
          if (name.rfind(runtime, 0) == 0) {
            static_cast<std::set<std::string>*>(data)->insert(path);
          }
        }
        return 0;
      },
      &found);
  return found;
}

TEST(OpenMp, OneRuntimeServesOurLoopsAndLibTorchs) {
  std::atomic<int64_t> total{0};
  at::parallel_for(0, 1000, 1,
                   [&](int64_t begin, int64_t end) { total += end - begin; });
#pragma omp parallel for
  for (int i = 0; i < 1000; ++i) ++total;
  EXPECT_EQ(total, 2000);
  const auto runtimes = loaded_openmp_runtimes();
  EXPECT_EQ(runtimes.size(), 1u) << testing::PrintToString(runtimes);
}

}  // namespace
