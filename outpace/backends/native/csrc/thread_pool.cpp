#include "thread_pool.h"

#include <map>

#include "spin.h"

namespace outpace {
namespace {

// How long a worker spins for the next step before it sleeps, in pauses: longer than the host's time between two steps
// (about 200 microseconds), because waking up takes tens of microseconds.
constexpr int kStartSpins = 20000;

}  // namespace

void Signal::raise() {
    // Sequentially consistent on both sides: either this thread sees the sleeper, or the sleeper sees the new value.
    value_.fetch_add(1);
    if (sleepers_.load() > 0) {
        { std::lock_guard<std::mutex> lock(mutex_); }
        changed_.notify_all();
    }
}

void Signal::wait_while(uint32_t old, int spins) {
    for (int i = 0; i < spins; i++) {
        if (value() != old) return;
        pause();
    }
    // With more threads than free cores, the awaited thread may need this core.
    for (int i = 0; i < kYields; i++) {
        if (value() != old) return;
        std::this_thread::yield();
    }
    std::unique_lock<std::mutex> lock(mutex_);
    sleepers_.fetch_add(1);
    changed_.wait(lock, [&] { return value_.load() != old; });
    sleepers_.fetch_sub(1);
}

ThreadPool::ThreadPool(int num_threads) : num_threads_(num_threads < 1 ? 1 : num_threads) {
    workers_.reserve(size_t(num_threads_ - 1));
    try {
        for (int i = 1; i < num_threads_; i++) workers_.emplace_back([this, i] { work(i); });
    } catch (...) {
        stopping_.store(true);
        start_.raise();
        for (auto& worker : workers_) worker.join();
        throw;
    }
}

ThreadPool::~ThreadPool() {
    stopping_.store(true);
    start_.raise();
    for (auto& worker : workers_) worker.join();
}

std::shared_ptr<ThreadPool> ThreadPool::shared(int num_threads) {
    static std::mutex mutex;
    static std::map<int, std::weak_ptr<ThreadPool>> pools;
    std::lock_guard<std::mutex> lock(mutex);
    auto pool = pools[num_threads].lock();
    if (!pool) pools[num_threads] = pool = std::make_shared<ThreadPool>(num_threads);
    return pool;
}

void ThreadPool::give(Call call, void* argument, uint64_t tag, bool is_together) {
    {
        std::lock_guard<std::mutex> lock(job_mutex_);
        job_ = Job{call, argument, tag, is_together, job_.number + 1};
    }
    start_.raise();
}

void ThreadPool::work(int thread) {
    uint32_t signal = 0, latest = 0;
    for (;;) {
        start_.wait_while(signal, kStartSpins);
        signal = start_.value();
        if (stopping_.load()) return;
        Job job;
        {
            std::lock_guard<std::mutex> lock(job_mutex_);
            if (job_.number == latest) continue;  // already done, before its signal was raised
            job = job_;
            num_inside_.fetch_add(1);
        }
        latest = job.number;
        if (job.call) job.call(job.argument, thread, job.tag);
        if (job.is_together) barrier();
        num_inside_.fetch_sub(1);
    }
}

void ThreadPool::leave(const void* work) {
    std::lock_guard<std::mutex> turn(turn_);
    {
        std::lock_guard<std::mutex> lock(job_mutex_);
        if (job_.argument == work) job_.call = nullptr;
    }
    while (num_inside_.load() > 0) std::this_thread::yield();
}

void ThreadPool::barrier() {
    if (num_threads_ == 1) return;
    const uint32_t round = passed_.value();
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == num_threads_) {
        arrived_.store(0, std::memory_order_relaxed);
        passed_.raise();
    } else {
        passed_.wait_while(round, kSpins);
    }
}

}  // namespace outpace
