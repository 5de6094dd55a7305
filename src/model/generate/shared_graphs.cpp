// shared_graphs.cpp - one backend for several StepGraphs.
#include "shared_graphs.h"

#include <utility>

namespace kvcache::model {
namespace {

class CountedWork final : public RecordedWork {
 public:
  CountedWork(std::unique_ptr<RecordedWork> work, std::shared_ptr<int> alive)
      : work_(std::move(work)), alive_(std::move(alive)) {
    ++*alive_;
  }
  ~CountedWork() override { --*alive_; }
  CountedWork(const CountedWork&) = delete;
  CountedWork& operator=(const CountedWork&) = delete;
  void replay() override { work_->replay(); }
  size_t bytes() const override { return work_->bytes(); }

 private:
  std::unique_ptr<RecordedWork> work_;
  std::shared_ptr<int> alive_;
};

class SharedGraphs final : public GraphBackend {
 public:
  explicit SharedGraphs(std::shared_ptr<GraphBackend> backend)
      : backend_(std::move(backend)) {}
  const char* name() const override { return backend_->name(); }
  std::unique_ptr<RecordedWork> record(
      const std::function<void()>& work) override {
    return std::make_unique<CountedWork>(backend_->record(work), alive_);
  }
  void synchronize() override { backend_->synchronize(); }
  void retired() override {
    if (*alive_ == 0) backend_->retired();
  }

 private:
  std::shared_ptr<GraphBackend> backend_;
  std::shared_ptr<int> alive_ = std::make_shared<int>(0);
};

}  // namespace

std::shared_ptr<GraphBackend> shared_graphs(
    std::shared_ptr<GraphBackend> backend) {
  if (!backend) backend = eager_graphs();
  return std::make_shared<SharedGraphs>(std::move(backend));
}

}  // namespace kvcache::model
