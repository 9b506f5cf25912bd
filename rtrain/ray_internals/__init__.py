"""The only package that uses Ray's private names: one function for each use.

A new version may remove any of them: the tests in tests/unit/ray_internals and tests/ray check that each exists and
keeps its meaning. Ray is not imported before a function is called. Other packages import the names below.
"""

from rtrain.ray_internals.cluster import (
    HEAD_RESOURCE as HEAD_RESOURCE,
    AutoscalingClient as AutoscalingClient,
    available_resources_by_node as available_resources_by_node,
    cluster_config as cluster_config,
    cluster_status as cluster_status,
    drain_local_nodes as drain_local_nodes,
    draining_node_ids as draining_node_ids,
    drop_forwarded_output as drop_forwarded_output,
    enable_local_token_auth as enable_local_token_auth,
    head_ip as head_ip,
    is_gcs_dead as is_gcs_dead,
    list_actors as list_actors,
    list_processes as list_processes,
    list_session_pids as list_session_pids,
    local_cluster_address as local_cluster_address,
    local_node_ids as local_node_ids,
    node_start_times as node_start_times,
    probe_head as probe_head,
    session_folder as session_folder,
)
from rtrain.ray_internals.data import (
    disable_data_actors as disable_data_actors,
    limit_stream as limit_stream,
    range_dataset as range_dataset,
)
from rtrain.ray_internals.groups import (
    get_placement_group as get_placement_group,
    make_group_start_callback as make_group_start_callback,
    make_silent_progress as make_silent_progress,
    make_torch_config as make_torch_config,
    make_trainer_class as make_trainer_class,
)
from rtrain.ray_internals.private import (
    is_private as is_private,
    mark_private as mark_private,
    slim_ray_init as slim_ray_init,
)
from rtrain.ray_internals.serving import (
    ReplicaServer as ReplicaServer,
    collect_broadcast_results as collect_broadcast_results,
    controller_name_and_namespace as controller_name_and_namespace,
    import_serve as import_serve,
    prepare_actor_process as prepare_actor_process,
    replace_replica_server as replace_replica_server,
    serve_host as serve_host,
    set_polling_interval as set_polling_interval,
    start_serve as start_serve,
    stop_proxies as stop_proxies,
    with_version as with_version,
)
