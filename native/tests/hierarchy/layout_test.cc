// Layouts that are invalid, or differ between ranks: every rank gets an error, and no rank waits.
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <functional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "ddl.h"
#include "thread_transport.h"

namespace ddl_test {
namespace {

struct Layout {
  std::vector<int32_t> group;
  std::vector<int32_t> outer;
  uint64_t staging_bytes = 0;
  double lost_after_s = 0;
};

// Returns the errors of all ranks, "" if a communicator was created.
std::vector<std::string> Create(const std::vector<Layout>& layouts,
                                const std::function<void(std::vector<ddl_transport>*)>& tweak = nullptr) {
  const size_t size = layouts.size();
  std::vector<ddl_transport> transports = MakeThreadTransports(static_cast<int>(size));
  if (tweak) tweak(&transports);
  std::vector<std::string> errors(size);
  std::vector<ddl_comm*> comms(size);
  const auto on_every_rank = [size](const std::function<void(size_t)>& body) {
    std::vector<std::thread> threads;
    for (size_t rank = 0; rank < size; ++rank) threads.emplace_back(body, rank);
    for (std::thread& thread : threads) thread.join();
  };
  on_every_rank([&](size_t rank) {
    ddl_options options{};
    options.abi_version = DDL_ABI_VERSION;
    options.group = layouts[rank].group.data();
    options.outer = layouts[rank].outer.data();
    options.num_outer = static_cast<uint32_t>(layouts[rank].outer.size());
    options.staging_bytes = layouts[rank].staging_bytes;
    options.lost_after_s = layouts[rank].lost_after_s;
    char text[2048] = "";
    comms[rank] = ddl_create(&transports[rank], &options, text, sizeof text);
    errors[rank] = text;
    EXPECT_EQ(comms[rank] == nullptr, !errors[rank].empty()) << rank;
  });
  on_every_rank([&](size_t rank) {
    if (comms[rank] != nullptr) ddl_destroy(comms[rank]);
  });
  return errors;
}

void ExpectEverywhere(const std::vector<Layout>& layouts, const std::string& part) {
  const std::vector<std::string> errors = Create(layouts);
  EXPECT_EQ(std::set<std::string>(errors.begin(), errors.end()).size(), 1u);
  EXPECT_NE(errors[0].find(part), std::string::npos) << "'" << part << "' is not in: " << errors[0];
}

TEST(LayoutTest, EqualLayoutsAreAccepted) {
  EXPECT_EQ(Create({{{0}, {}}}), std::vector<std::string>{""});
  EXPECT_EQ(Create({{{0}, {1}}}), std::vector<std::string>{""});
  const Layout layout{{0, 1, 2, 3}, {2, 2}};
  EXPECT_EQ(Create({layout, layout, layout, layout}), std::vector<std::string>(4));
}

TEST(LayoutTest, AnInvalidLayoutFailsOnEveryRank) {
  ExpectEverywhere({{{1}, {}}}, "group[0] = 1");
  ExpectEverywhere({{{0}, {2}}}, "a product of 2");
  ExpectEverywhere({{{0}, {1, 0}}}, "a product of 0");
  // Invalid on one rank only.
  ExpectEverywhere({{{0, 0}, {}}, {{0, 2}, {}}}, "Received: group[1] = 2. (on rank 1)");
  const Layout one_group{{0, 0, 0}, {}};
  ExpectEverywhere({one_group, one_group, {{0, 0, 1}, {}}}, "Received: group[2] = 1. (on rank 2)");
  for (const double seconds : {0.5, -1.0}) {
    Layout hasty{{0, 1}, {}};
    hasty.lost_after_s = seconds;
    ExpectEverywhere({{{0, 1}, {}}, hasty}, "lost_after_s: must be 0 or at least 1 second");
  }
}

// Builds may differ in everything but the first exchange.
TEST(LayoutTest, DifferentVersionsFailOnEveryRank) {
  static int (*real)(void*, const void*, void*, size_t);
  static std::atomic<int> exchanges{0};
  const auto older = [](void* self, const void* in, void* out, size_t bytes) {
    ++exchanges;
    std::vector<char> record(static_cast<const char*>(in), static_cast<const char*>(in) + bytes);
    const uint32_t version = 1;
    std::memcpy(record.data(), &version, sizeof version);
    EXPECT_EQ(bytes, 64u);
    return real(self, record.data(), out, bytes);
  };
  const Layout flat{{0, 0, 0}, {}};
  const std::vector<std::string> errors = Create({flat, flat, flat}, [&](std::vector<ddl_transport>* transports) {
    real = (*transports)[1].all_gather;
    (*transports)[1].all_gather = older;
  });
  const std::string expected = "Received: native ABI 1 on rank(s) 1; native ABI " + std::to_string(DDL_ABI_VERSION) +
                               " on rank(s) 0, 2. Install one version on every host.";
  for (const std::string& error : errors) EXPECT_NE(error.find(expected), std::string::npos) << error;
  EXPECT_EQ(exchanges, 1);
}

TEST(LayoutTest, DifferentBoxesOfEqualGroupsFailOnEveryRank) {
  const Layout flat{{0, 1, 2, 3}, {}};
  const Layout box{{0, 1, 2, 3}, {2, 2}};
  ExpectEverywhere({flat, flat, box, flat}, "a box of 2x2, slots of ");
  ExpectEverywhere({flat, flat, box, flat}, "not watched, groups 0 1 2 3 on rank(s) 0, 1, 3");
  ExpectEverywhere({box, {{0, 1, 2, 3}, {4}}, box, box}, "a box of 4, slots");
}

TEST(LayoutTest, DifferentGroupsFailOnEveryRank) {
  ExpectEverywhere({{{0, 0}, {}}, {{0, 1}, {}}}, "groups 0 1 on rank(s) 1");
  // Distinguished even if the text is too long to show the difference.
  std::vector<Layout> many(120, Layout{std::vector<int32_t>(120, 0), {}});
  many[119].group[119] = 119;
  ExpectEverywhere(many, "on rank(s) 119");
}

TEST(LayoutTest, DifferentSettingsFailOnEveryRank) {
  Layout small{{0, 0}, {}};
  small.staging_bytes = 1 << 18;
  ExpectEverywhere({{{0, 0}, {}}, small}, "slots of 32768 bytes");
  Layout watched{{0, 1}, {}};
  watched.lost_after_s = 5;
  ExpectEverywhere({{{0, 1}, {}}, watched}, "hosts lost after 5 s, groups 0 1 on rank(s) 1");
  // The setting decides how often a rank must show a sign of life. Shown even if there are many groups.
  std::vector<Layout> many(120, Layout{std::vector<int32_t>(120, 0), {}, 0, 5});
  many[7].lost_after_s = 2.5;
  ExpectEverywhere(many, "hosts lost after 2.5 s, groups 0 0");
}

}  // namespace
}  // namespace ddl_test
