#ifndef FERRY_CHANNEL_TABLES_HPP
#define FERRY_CHANNEL_TABLES_HPP

/// A Routing described the way libraries do that divide a rank's tokens into *channels*, equal parts in token order:
/// prefix counts by channel. Ferry itself moves nothing by channels; interfaces that hand such tables to their users
/// make them with `Group::channel_tables`.

#include "ferry/types.hpp"

namespace ferry {

/// Most channels.
inline constexpr int kMaxChannels = 1024;

/// Outputs of `Group::channel_tables`, i32 and contiguous; any may be absent. C is the number of channels: channel c of
/// a rank has its tokens from c * ceil(T / C) on, as many of the T as are left, at most ceil(T / C).
struct ChannelTables {
  TensorView rank_prefix{};          ///< [R, R]: (i, j) counts the tokens that ranks 0 to i send to rank j
  TensorView send_channel_prefix{};  ///< [R, C]: (r, c) counts this rank's tokens of channels 0 to c that go to rank r
  TensorView recv_channel_prefix{};  ///< [R, C]: (r, c) counts this rank's rows from channels of rank r before c
  TensorView source_token{};         ///< [N]: the token at its source of each row; -1 in rows without a token
  TensorView send_index{};           ///< [T, R]: which of this rank's tokens for rank r it is, from 0; -1: none
};

/// Tables that a route writes along with its own, before it is known how many rows there are.
struct EarlyTables {
  int num_channels = 0;  ///< 0: none
  /// Here `source_token` has any number M of rows: of N rows more than M are not written, and the rest of more than N
  /// are -1.
  ChannelTables out{};
};

}  // namespace ferry

#endif  // FERRY_CHANNEL_TABLES_HPP
