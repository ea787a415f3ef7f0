#include "control/relay.h"

#include <algorithm>
#include <utility>

#include "control/known_collectives.h"

namespace ddl {

Relay::Relay(const ControlTree& tree)
    : tree_(tree), place_of_(static_cast<size_t>(tree.ranks().back()) + 1, -1), joined_(tree.ranks().size(), false) {
  for (size_t place = 0; place < tree.ranks().size(); ++place) {
    place_of_[static_cast<size_t>(tree.ranks()[place])] = static_cast<int>(place);
  }
}

const std::string& Relay::NameOf(const AlikeAnnouncements& alike) const {
  return alike.id != 0 ? names_.at(alike.id) : alike.announcement.name;
}

void Relay::Add(AlikeAnnouncements alike, double now) {
  auto source = std::make_shared<Source>();
  if (alike.id == 0) {
    Announcement contents = alike.announcement;
    if (HasFreeRows(contents.kind)) contents.rows = 0;
    source->contents = ContentsOf(contents);
  }
  const std::string name = NameOf(alike);
  const bool joins = alike.id == 0 && alike.announcement.kind == DDL_JOIN;
  source->alike = std::move(alike);
  if (joins) {
    // Must not overtake anything; and nothing waits for this rank from now on.
    for (auto& [held, entry] : entries_) SendEverything(entry);
    for (size_t i = 0; i < source->alike.ranks.size(); ++i) {
      const auto place = static_cast<size_t>(place_of_[static_cast<size_t>(source->alike.ranks[i])]);
      num_joined_ += joined_[place] ? 0 : 1;
      joined_[place] = true;
    }
    entries_.clear();
    messages_.push_back(EncodeAlike(source->alike));
    return;
  }
  Entry& entry = entries_[name];
  if (entry.by_place.empty()) {
    entry.by_place.resize(tree_.ranks().size());
    entry.owed.resize(tree_.ranks().size(), 0);
  }
  if (entry.present == 0) entry.since = now;
  std::vector<Held> late;
  for (size_t i = 0; i < source->alike.ranks.size(); ++i) {
    const auto place = static_cast<size_t>(place_of_[static_cast<size_t>(source->alike.ranks[i])]);
    if (entry.owed[place] > 0) {
      --entry.owed[place];
      --entry.num_owed;
      late.push_back({source, i});
      continue;
    }
    auto& queue = entry.by_place[place];
    entry.present += queue.empty() ? 1 : 0;
    ++num_held_;
    queue.push_back({source, i});
  }
  if (!late.empty()) Send(late);
  while (entry.present > 0 && entry.present + num_joined_ == tree_.ranks().size()) {
    SendOldest(entry);
    entry.since = now;
  }
  Forget(entries_.find(name));
}

void Relay::SendOldest(Entry& entry) {
  std::vector<Held> together;
  for (size_t place = 0; place < entry.by_place.size(); ++place) {
    auto& queue = entry.by_place[place];
    if (queue.empty()) {
      if (joined_[place]) continue;
      ++entry.owed[place];
      ++entry.num_owed;
      continue;
    }
    together.push_back(std::move(queue.front()));
    queue.pop_front();
    --num_held_;
    entry.present -= queue.empty() ? 1 : 0;
  }
  Send(together);
}

void Relay::SendEverything(Entry& entry) {
  while (entry.present > 0) SendOldest(entry);
}

void Relay::Send(const std::vector<Held>& together) {
  struct Alike {
    const Source* like;
    AlikeAnnouncements all;
  };
  std::vector<Alike> groups;
  Alike* last = nullptr;
  for (const Held& held : together) {
    const Source* const source = held.source.get();
    const auto alike = [&](const Alike& group) {
      return group.like == source ||
             (group.like->alike.id == source->alike.id && group.like->contents == source->contents &&
              source->alike.announcement.splits.empty());
    };
    if (last == nullptr || !alike(*last)) {
      auto found = std::find_if(groups.begin(), groups.end(), alike);
      if (found == groups.end()) {
        found = groups.insert(found, {source, {}});
        found->all.id = source->alike.id;
        found->all.announcement = source->alike.announcement;
      }
      last = &*found;
    }
    last->all.ranks.push_back(source->alike.ranks[held.index]);
    last->all.steps.push_back(source->alike.steps[held.index]);
    if (last->all.id == 0) last->all.rows.push_back(source->alike.rows[held.index]);
  }
  for (const Alike& group : groups) messages_.push_back(EncodeAlike(group.all));
}

void Relay::Forget(Entries::iterator at) {
  if (at->second.present == 0 && at->second.num_owed == 0) entries_.erase(at);
}

void Relay::OnDecision(const Decision& decision) {
  if (decision.gives_id) names_[decision.id] = decision.name;
  const bool by_id = decision.id != 0 && !decision.gives_id;
  if (!by_id && decision.name.empty()) {  // of a join
    joined_.assign(joined_.size(), false);
    num_joined_ = 0;
    return;
  }
  const auto at = entries_.find(by_id ? names_.at(decision.id) : decision.name);
  if (at == entries_.end()) return;
  // Who was late for what has failed may never come, and nobody is late for what runs.
  if (decision.code == DDL_OK && at->second.present > 0) return;
  at->second.owed.assign(at->second.owed.size(), 0);
  at->second.num_owed = 0;
  Forget(at);
}

void Relay::Tick(double now) {
  if (num_held_ == 0) return;
  for (auto& [name, entry] : entries_) {
    if (entry.present > 0 && now - entry.since > kPatienceSeconds) SendEverything(entry);
  }
}

std::vector<std::string> Relay::TakeMessages() { return std::exchange(messages_, {}); }

}  // namespace ddl
