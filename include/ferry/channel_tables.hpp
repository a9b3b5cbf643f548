#ifndef FERRY_CHANNEL_TABLES_HPP
#define FERRY_CHANNEL_TABLES_HPP

/// A Routing as prefix counts by *channel*: equal parts of a rank's tokens, in token order, as some libraries use them.
/// Ferry itself does not use channels; interfaces that hand such tables to their users fill them with
/// `Group::channel_tables`.

#include "ferry/types.hpp"

namespace ferry {

/// Largest number of channels.
inline constexpr int kMaxChannels = 1024;

/// Outputs of `Group::channel_tables`, i32 and contiguous; any may be absent. C is the number of channels: channel c of
/// a rank holds its tokens from c * ceil(T / C) on, at most ceil(T / C) of them and none past T.
struct ChannelTables {
  TensorView rank_prefix{};          ///< [R, R]: (i, j) counts the tokens that ranks 0 to i send to rank j
  TensorView send_channel_prefix{};  ///< [R, C]: (r, c) counts this rank's tokens of channels 0 to c that go to rank r
  TensorView recv_channel_prefix{};  ///< [R, C]: (r, c) counts this rank's rows from channels of rank r before c
  TensorView source_token{};         ///< [N]: source token of each row; -1 in rows without a token
  TensorView send_index{};           ///< [T, R]: index among this rank's tokens for rank r, from 0; -1: not sent
};

/// Tables that a route writes along with its own, before the number of rows is known.
struct EarlyTables {
  int num_channels = 0;  ///< 0: none
  /// `source_token` may have any number M of rows here: with N > M, rows past M are not written; with N < M, rows past
  /// N are -1.
  ChannelTables out{};
};

}  // namespace ferry

#endif  // FERRY_CHANNEL_TABLES_HPP
