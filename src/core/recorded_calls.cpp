#include "ferry/recorded_calls.hpp"

#include <nlohmann/json.hpp>

namespace ferry {
namespace {

using nlohmann::json;

json to_object(const RecordedCall& call) {
  return {{"operation", call.operation},
          {"number", call.number},
          {"phase", to_string(call.phase)},
          {"tokens", call.num_tokens},
          {"topk", call.num_topk},
          {"row_bytes", call.row_bytes},
          {"dtype", call.row_bytes > 0 ? json(to_string(call.dtype)) : json()},
          {"called_ns", call.called_ns},
          {"ended_ns", call.ended_ns},
          {"code", to_string(call.code)},
          {"peer", call.peer}};
}

json to_object(const RecordedWait& wait) {
  return {{"ranks", wait.ranks},       {"num_missing", wait.num_missing}, {"reason", wait.reason},
          {"since_ns", wait.since_ns}, {"on_gpu", wait.on_gpu},           {"step", wait.step}};
}

json to_object(const RecordedRank& rank) {
  json object = {{"rank", rank.rank},         {"pid", rank.pid},        {"process", to_string(rank.process)},
                 {"has_left", rank.has_left}, {"waits", json::array()}, {"calls", json::array()}};
  for (const RecordedWait& wait : rank.waits) object["waits"].push_back(to_object(wait));
  for (const RecordedCall& call : rank.calls) object["calls"].push_back(to_object(call));
  return object;
}

}  // namespace

std::string RecordedGroup::to_json() const {
  json object = {{"id", id},
                 {"num_ranks", num_ranks},
                 {"ranks_per_node", ranks_per_node},
                 {"timeout_ns", timeout_ns},
                 {"now_ns", now_ns},
                 {"wall_offset_ns", wall_offset_ns},
                 {"diagnosis",
                  {{"kind", to_string(diagnosis.kind)},
                   {"rank", diagnosis.rank},
                   {"peer", diagnosis.peer},
                   {"text", diagnosis.text}}},
                 {"ranks", json::array()}};
  for (const RecordedRank& rank : ranks) object["ranks"].push_back(to_object(rank));
  return object.dump();
}

}  // namespace ferry
