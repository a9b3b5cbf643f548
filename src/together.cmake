# Groups of files that are compiled together, for the reason at ferry_together. A new file may stay out of them. If
# names of two files clash, one of the files leaves the group. registry.cpp stays alone: in a static library it brings
# every backend.
ferry_together(plan_1 balance/arguments.cpp balance/balance.cpp balance/block.cpp balance/exchange.cpp
  balance/greedy.cpp balance/homes.cpp balance/layer.cpp balance/matching.cpp balance/state.cpp balance/steps.cpp
  numeric/fp8.cpp)
ferry_together(plan_2 balance/move_plan.cpp numeric/gating.cpp numeric/gating_presets.cpp numeric/strided.cpp
  plan/arrival_tables.cpp plan/forward_table.cpp plan/replicas.cpp plan/route_plan.cpp)
ferry_together(plan_3 numeric/quantize.cpp plan/peer_counts.cpp plan/token_layout.cpp)
ferry_together(bootstrap_1 bootstrap/channel.cpp bootstrap/errors.cpp bootstrap/frame.cpp bootstrap/handshake.cpp
  bootstrap/in_process.cpp bootstrap/launcher_environment.cpp bootstrap/tcp_acceptor.cpp bootstrap/tcp_admission.cpp)
ferry_together(bootstrap_2 bootstrap/ports.cpp bootstrap/slurm.cpp bootstrap/socket.cpp bootstrap/tcp_bootstrap.cpp
  bootstrap/tcp_dial.cpp bootstrap/tcp_peer.cpp bootstrap/tcp_root.cpp)
ferry_together(c_1 c/balance.cpp c/bootstrap.cpp c/callback_bootstrap.cpp c/components.cpp c/convert.cpp
  c/exchange.cpp c/expansion.cpp c/gating.cpp)
ferry_together(c_2 c/group.cpp c/placement.cpp c/status.cpp c/structs.cpp c/tables.cpp)
ferry_together(c_3 c/load.cpp c/latency.cpp c/membership.cpp c/memory.cpp c/one_sided.cpp c/quantization.cpp
  c/routing.cpp)
ferry_together(core_1 call/call_sync.cpp call/exchange.cpp call/group_state.cpp call/wait.cpp core/agreement.cpp
  local/arrival_tables.cpp core/bytes_required.cpp core/check_channel_tables.cpp)
ferry_together(core_2 call/route_nodes.cpp core/check_exchange.cpp core/check_latency.cpp core/check_route.cpp
  core/checks.cpp core/descriptors.cpp core/expert_placement.cpp local/gating.cpp)
ferry_together(core_3 local/dispatch_layout.cpp core/group.cpp core/host_identity.cpp core/latency_calls.cpp
  core/known_memory.cpp core/load.cpp core/overlap.cpp core/placement.cpp)
ferry_together(core_4 local/expansion.cpp core/group_options.cpp core/placement_digest.cpp core/process_identity.cpp
  core/recorded_calls.cpp local/quantize.cpp core/quantized_dispatch.cpp core/rank_host.cpp core/routing.cpp)
ferry_together(core_5 core/call_numbers.cpp core/diagnosis.cpp core/flight_recorder.cpp core/flight_snapshot.cpp
  core/forks.cpp core/status.cpp core/tile_signals.cpp core/tuning.cpp core/types.cpp
  local/local_ops.cpp)
ferry_together(cpu_1 cpu/backend.cpp cpu/backend_latency.cpp cpu/memory_required.cpp cpu/rows/combine_inputs.cpp
  cpu/internode/route.cpp cpu/intranode/route.cpp cpu/intranode/route_steps.cpp cpu/context/channel_tables.cpp)
ferry_together(cpu_2 cpu/internode/combine.cpp cpu/context/routing.cpp cpu/latency/mask_board.cpp
  cpu/latency/slab_routing.cpp cpu/latency/tile_wait.cpp cpu/local/expansion.cpp cpu/local/local_ops.cpp cpu/rows/row_copy.cpp cpu/rows/row_sum.cpp
  cpu/rows/wire_rows.cpp cpu/context/staging.cpp)
ferry_together(cpu_3 cpu/internode/dispatch.cpp cpu/rows/token_records.cpp)
ferry_together(net_1 net/blob.cpp net/devices.cpp net/gpu_direct.cpp net/loopback/engine.cpp
  net/loopback/inbox.cpp net/nearest.cpp net/numa.cpp net/proxy.cpp)
ferry_together(net_2 net/ucx/setup.cpp net/ucx/address.cpp net/ucx/admission.cpp net/ucx/connection.cpp
  net/ucx/engine.cpp net/ucx/inbound.cpp net/ucx/limits.cpp net/ucx/paths.cpp)
ferry_together(net_3 net/ucx/gpu_memory.cpp net/ucx/peer.cpp net/ucx/ports.cpp net/ucx/resources.cpp
  net/ucx/scopes.cpp net/ucx/serve.cpp)
ferry_together(node_1 node/arena.cpp node/futex.cpp node/page_heap.cpp node/peers.cpp node/recorded_calls.cpp
  node/rendezvous.cpp node/same_process.cpp node/service_thread.cpp rail/call_header.cpp)
ferry_together(node_2 node/peer_link.cpp rail/chunk_reader.cpp rail/net_devices.cpp rail/network.cpp rail/port_choice.cpp
  rail/rails.cpp rail/ring.cpp rail/ring_memory.cpp)
ferry_together(one_sided_1 one_sided/collective_calls.cpp one_sided/core.cpp one_sided/cpu_backend.cpp
  one_sided/device_calls.cpp one_sided/driver.cpp one_sided/driver_thread.cpp one_sided/fabric_meetings.cpp one_sided/held_requests.cpp
  one_sided/ring_source.cpp)
ferry_together(one_sided_2 one_sided/fabric.cpp one_sided/fabric_losses.cpp one_sided/one_sided.cpp)
# cuda/driver/launch.cpp stays alone, because emulated kernels replace its functions.
if(FERRY_WITH_CUDA)
  ferry_together(cuda_1 cuda/driver/cuda_call.cpp cuda/driver/device_guard.cpp cuda/driver/launch_observer.cpp
    cuda/memory/arena_exchange.cpp cuda/memory/arena_service.cpp cuda/memory/deferred_free.cpp
    cuda/memory/device_arena.cpp cuda/memory/memory_checks.cpp)
  ferry_together(cuda_2 cuda/driver/driver.cpp cuda/memory/peer_mapping.cpp cuda/memory/pinned_memory.cpp
    cuda/memory/table_memory.cpp cuda/sync/call_log.cpp cuda/sync/fault_text.cpp)
  ferry_together(cuda_3 cuda/memory/card_memory.cpp cuda/context/context.cpp
    cuda/context/gpu_direct.cpp cuda/context/parts.cpp cuda/context/peer_watch.cpp)
  ferry_together(cuda_internode_1 cuda/internode/bounded_route.cpp cuda/internode/channel_tables.cpp
    cuda/internode/combine.cpp cuda/internode/kernel_routing.cpp cuda/internode/latency.cpp
    cuda/internode/node_route_steps.cpp cuda/internode/node_tables.cpp cuda/internode/side_stream.cpp)
  ferry_together(cuda_internode_2 cuda/internode/dispatch.cpp cuda/internode/memory_required.cpp
    cuda/internode/steps.cpp)
  ferry_together(cuda_call_1 cuda/call/channel_tables.cpp cuda/call/dispatch_parts.cpp cuda/call/memory_required.cpp
    cuda/placement/homes.cpp cuda/placement/placements.cpp)
  ferry_together(cuda_call_2 cuda/call/routing.cpp cuda/call/tuning.cpp cuda/call/wait_times.cpp)
  ferry_together(cuda_intranode_1 cuda/intranode/channel_tables.cpp cuda/intranode/combine.cpp)
  ferry_together(cuda_intranode_2 cuda/intranode/dispatch.cpp cuda/context/rail_link.cpp)
  ferry_together(cuda_local cuda/local/arrival_tables.cpp cuda/local/expansion.cpp cuda/local/gating.cpp
    cuda/local/local_call.cpp cuda/local/local_ops.cpp cuda/local/quantize.cpp cuda/local/token_layout.cpp)
  ferry_together(cuda_latency cuda/latency/calls.cpp cuda/latency/memory.cpp cuda/one_sided/backend.cpp
    cuda/one_sided/errors.cpp cuda/one_sided/memory.cpp cuda/one_sided/registered_memory.cpp cuda/one_sided/streams.cpp
    cuda/one_sided/watch.cpp)
endif()
