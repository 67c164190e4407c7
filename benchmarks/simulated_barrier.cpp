// Simulates the barriers of a shutdown in one thread, without processes: each worker has the product's Barrier, and the
// network has a delay and a bandwidth. simulated_start.py compiles and runs it.
//
//     simulated_barrier WORKERS FAN_OUT LATE_PER_CENT LATE_S DEATHS
//
// Prints JSON: the simulated seconds of two rounds, and the frames, bytes and contacts of the busiest worker.

#include "peers/barrier.h"
#include "wire/header.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <queue>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

using namespace torch_ucx_rpc;

namespace {

constexpr double kDelayS = 50e-6;
constexpr double kBytesPerS = 10e9 / 8;
constexpr double kFrameS = 5e-6; // a worker's time to send or receive a frame
constexpr double kConnectS = 1.2e-3; // a worker's time to meet another worker, measured over TCP with 64 workers
constexpr double kTickS = 0.1;
constexpr uint64_t kRounds = 2; // a shutdown without open calls
constexpr size_t kFrameBytes = sizeof(wire::Header) + 100; // 100 bytes for the protocols below

class Simulation;

class Worker final : public Barrier::Link {
 public:
  Worker(Simulation& simulation, Rank rank, int fanOut)
      : barrier(rank, *this, fanOut), simulation_(simulation), rank_(rank) {}
  bool isPresent(Rank rank) const override {
    return !noticed.contains(rank);
  }
  Rank endOfRanks() const override;
  Error lost() const override {
    return noticed.empty() ? Error() : Error(ErrorCode::kPeerFailed, std::to_string(noticed.size()) + " have died");
  }
  void sendArrive(Rank to, uint64_t round, const Barrier::Arrivals& arrivals) override;
  void sendRelease(Rank to, uint64_t round, const Barrier::Result& result) override;

  Barrier barrier;
  std::set<Rank> met;
  std::set<Rank> noticed; // the dead that this worker knows
  bool isDead = false;
  uint64_t entered = 0;
  double busyUntil = 0;
  size_t frames = 0;
  size_t bytes = 0;

 private:
  Simulation& simulation_;
  const Rank rank_;
};

class Simulation {
 public:
  Simulation(Rank workers, int fanOut) {
    for (Rank rank = 0; rank < workers; ++rank) {
      workers_.push_back(std::make_unique<Worker>(*this, rank, fanOut));
    }
  }
  Worker& at(Rank rank) {
    return *workers_[static_cast<size_t>(rank)];
  }
  Rank size() const {
    return static_cast<Rank>(workers_.size());
  }
  double now() const {
    return now_;
  }

  void schedule(double time, std::function<void()> what) {
    events_.push({time, next_++, std::move(what)});
  }
  void run() {
    while (!events_.empty()) {
      Event event = std::move(const_cast<Event&>(events_.top()));
      events_.pop();
      now_ = event.time;
      event.what();
    }
  }

  // A frame leaves when its sender has time, and is taken in when its receiver has time.
  void send(Rank from, Rank to, size_t bytes, std::function<void(Worker&)> take) {
    meet(from, to);
    const double sent = spend(from, kFrameS + static_cast<double>(bytes) / kBytesPerS, bytes);
    if (at(to).isDead) {
      return; // meet() has told the sender
    }
    schedule(sent + kDelayS, [this, from, to, bytes, take = std::move(take)] {
      if (!at(to).isDead && !at(from).isDead) {
        (void)spend(to, kFrameS, bytes);
        take(at(to));
        look(to);
      }
    });
  }
  void meet(Rank one, Rank other) {
    if (at(one).met.insert(other).second) {
      at(one).busyUntil = std::max(now_, at(one).busyUntil) + kConnectS;
      at(other).met.insert(one);
    }
    if (at(other).isDead) {
      notice(one, other);
    }
  }
  void die(Rank rank) {
    at(rank).isDead = true;
    for (const Rank other : at(rank).met) {
      notice(other, rank);
    }
  }

  void enter(Rank rank) {
    Worker& worker = at(rank);
    if (!worker.isDead) {
      ++worker.entered;
      worker.barrier.enter(0);
      schedule(now_ + kTickS, [this, rank, round = worker.entered] { tick(rank, round); });
      look(rank);
    }
  }

  double lastReleased = 0;

 private:
  struct Event {
    double time;
    uint64_t number;
    std::function<void()> what;
    bool operator<(const Event& other) const {
      return std::pair(time, number) > std::pair(other.time, other.number);
    }
  };

  // Returns the time at which the worker is done with this much work.
  double spend(Rank rank, double seconds, size_t bytes) {
    Worker& worker = at(rank);
    ++worker.frames;
    worker.bytes += bytes;
    return worker.busyUntil = std::max(now_, worker.busyUntil) + seconds;
  }
  void notice(Rank rank, Rank dead) {
    schedule(now_ + 2 * kDelayS, [this, rank, dead] {
      if (!at(rank).isDead && at(rank).noticed.insert(dead).second) {
        at(rank).barrier.onMembershipChange();
        look(rank);
      }
    });
  }
  // Enters the second round once the first is over.
  void look(Rank rank) {
    Worker& worker = at(rank);
    Barrier::Result result;
    if (!worker.isDead && worker.entered != 0 && worker.barrier.wait(std::chrono::milliseconds(0), result)) {
      lastReleased = std::max(lastReleased, std::max(now_, worker.busyUntil));
      if (worker.entered < kRounds) {
        enter(rank);
      }
    }
  }
  void tick(Rank rank, uint64_t round) {
    Worker& worker = at(rank);
    Barrier::Result result;
    if (worker.isDead || worker.entered != round || worker.barrier.wait(std::chrono::milliseconds(0), result)) {
      return;
    }
    worker.barrier.tick();
    for (const Rank other : worker.barrier.toContact()) {
      meet(rank, other);
    }
    schedule(now_ + kTickS, [this, rank, round] { tick(rank, round); });
  }

  std::vector<std::unique_ptr<Worker>> workers_;
  std::priority_queue<Event> events_;
  uint64_t next_ = 0;
  double now_ = 0;
};

Rank Worker::endOfRanks() const {
  return simulation_.size();
}

void Worker::sendArrive(Rank to, uint64_t round, const Barrier::Arrivals& arrivals) {
  // Count the runs of ranks. All values are the same.
  size_t runs = arrivals.gone.size();
  Rank next = -1;
  for (const auto& [rank, value] : arrivals.values) {
    runs += rank != next ? 1 : 0;
    next = static_cast<Rank>(rank + 1);
  }
  simulation_.send(
      rank_, to, kFrameBytes + sizeof(wire::BarrierRun) * runs, [from = rank_, round, arrivals](Worker& worker) {
        worker.barrier.onArrive(from, round, arrivals);
      });
}

void Worker::sendRelease(Rank to, uint64_t round, const Barrier::Result& result) {
  simulation_.send(
      rank_,
      to,
      kFrameBytes + sizeof(wire::BarrierRelease) + result.lost.message().size(),
      [from = rank_, round, result](Worker& worker) { worker.barrier.onRelease(from, round, result); });
}

} // namespace

int main(int, char** arguments) {
  const auto workers = static_cast<Rank>(std::atoi(arguments[1]));
  Simulation simulation(workers, std::atoi(arguments[2]));
  const double lateShare = std::atof(arguments[3]) / 100;
  const double lateS = std::atof(arguments[4]);
  std::mt19937 random(1);
  std::uniform_real_distribution<double> some(0, 1);
  for (Rank rank = 0; rank < workers; ++rank) {
    const double start = some(random) < lateShare ? lateS : 0.01 * some(random);
    simulation.schedule(start, [&simulation, rank] { simulation.enter(rank); });
  }
  const int deaths = std::atoi(arguments[5]);
  for (int death = 0; death < deaths; ++death) {
    const auto inner = static_cast<Rank>(1 + 7 * death); // directly below the coordinator
    simulation.schedule(0.005 * (death + 1), [&simulation, inner] { simulation.die(inner); });
  }
  simulation.run();
  size_t frames = 0;
  size_t bytes = 0;
  size_t contacts = 0;
  int waiting = 0;
  for (Rank rank = 0; rank < workers; ++rank) {
    Worker& worker = simulation.at(rank);
    Barrier::Result result;
    waiting += !worker.isDead && !worker.barrier.wait(std::chrono::milliseconds(0), result) ? 1 : 0;
    frames = std::max(frames, worker.frames);
    bytes = std::max(bytes, worker.bytes);
    contacts = std::max(contacts, worker.met.size());
  }
  std::printf(
      "{\"seconds\": %.4f, \"frames\": %zu, \"bytes\": %zu, \"contacts\": %zu, \"waiting\": %d}\n",
      simulation.lastReleased,
      frames,
      bytes,
      contacts,
      waiting);
  return waiting;
}
