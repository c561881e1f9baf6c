// What the link is told of each batch: whether somebody waits for it.
#include "runtime/transfer_engine.hpp"

#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "cpu/host_device.hpp"
#include "cpu/host_pool.hpp"
#include "cpu/topology.hpp"
#include "cpu/workers.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/forwarding.hpp"

using namespace sluice;
using namespace sluice::runtime;

namespace {

/// A stream that notes how it is asked to copy.
class NotingStream final : public test::ForwardingStream {
 public:
  NotingStream(std::unique_ptr<Stream> inner, std::vector<std::string>& notes)
      : ForwardingStream(std::move(inner)), notes_(notes) {}
  void copy(std::span<const Copy> batch) override {
    notes_.push_back("waited for: " + std::to_string(batch.size()));
    inner_->copy(batch);
  }
  void copy_in_background(std::span<const Copy> batch) override {
    notes_.push_back("background: " + std::to_string(batch.size()));
    inner_->copy_in_background(batch);
  }

 private:
  std::vector<std::string>& notes_;
};

class NotingDevice final : public test::ForwardingDevice {
 public:
  using ForwardingDevice::ForwardingDevice;
  [[nodiscard]] std::unique_ptr<Stream> create_stream(const std::string& name) override {
    return std::make_unique<NotingStream>(inner_->create_stream(name), notes);
  }

  std::vector<std::string> notes;
};

}  // namespace

TEST_CASE("fetches are waited for; promotions and other copies travel in the background", "[transfer_engine]") {
  const cpu::Topology topology;
  const auto workers = std::make_shared<const cpu::Workers>(topology, cpu::WorkersOptions{.threads = 1, .pin = false});
  NotingDevice device(std::make_shared<cpu::HostDevice>(workers));
  const PageLayout layout{.page_tokens = 16, .head_dim = 64};
  cpu::HostPool pool({.layout = layout, .bytes = 8 * layout.page_bytes()}, topology, *workers, device);
  const std::vector<PageRef> pages = pool.allocate(4);
  for (std::size_t i = 0; i < pages.size(); ++i)
    std::memset(pool.frame(pages[i].frame), static_cast<int>(i + 1), layout.page_bytes());
  const auto near = device.allocate(8 * layout.page_bytes());
  TransferEngine link(device, pool);

  const std::vector<PageMove> neighbours{{pages[0], 0}, {pages[1], 1}, {pages[2], 4}};
  link.fetch(neighbours, near->data());
  const Transfer promoted = link.promote({{pages[3], 6}, {pages[2], 7}}, near->data());
  const Copy back{.to = pool.frame(pages[0].frame), .from = near->data() + 6 * layout.page_bytes(), .bytes = 64};
  link.copy(std::span(&back, 1));
  link.stream().synchronize(deadline_after(std::chrono::seconds(30)));

  REQUIRE(device.notes == std::vector<std::string>{"waited for: 2", "background: 2", "background: 1"});
  REQUIRE(promoted.landed->state() == Event::State::done);
  const auto first_byte = [&](std::uint32_t slot) { return near->data()[slot * layout.page_bytes()]; };
  REQUIRE(first_byte(0) == std::byte{1});
  REQUIRE(first_byte(1) == std::byte{2});
  REQUIRE(first_byte(4) == std::byte{3});
  REQUIRE(first_byte(6) == std::byte{4});
  REQUIRE(first_byte(7) == std::byte{3});
  REQUIRE(pool.frame(pages[0].frame)[63] == std::byte{4});
}
