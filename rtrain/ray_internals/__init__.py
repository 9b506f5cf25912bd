"""Every private name of Ray that rtrain uses, each by a function that says what it means.

A new version may take any of them away: `tests/test_ray_internals*.py` ask that each still exists and means the same.
Ray is not imported before a function is called. The names below are what the other rooms use.
"""

from rtrain.ray_internals.cluster import (
    HEAD_RESOURCE as HEAD_RESOURCE,
    Requests as Requests,
    actors as actors,
    available_by_node as available_by_node,
    cluster_config as cluster_config,
    cluster_status as cluster_status,
    drain as drain,
    draining_nodes as draining_nodes,
    head as head,
    head_ip as head_ip,
    joined as joined,
    nodes_here as nodes_here,
    running_here as running_here,
    use_token_of_this_machine as use_token_of_this_machine,
)
from rtrain.ray_internals.data import (
    numbers as numbers,
    stream_within as stream_within,
    without_data_actors as without_data_actors,
)
from rtrain.ray_internals.groups import (
    on_group_start as on_group_start,
    placement_group as placement_group,
    silent_progress as silent_progress,
    torch_config as torch_config,
    torch_trainer as torch_trainer,
)
from rtrain.ray_internals.private import (
    is_private as is_private,
    lean as lean,
    mark as mark,
)
from rtrain.ray_internals.process import (
    drop_forwarded_output as drop_forwarded_output,
    processes as processes,
    session_folder as session_folder,
    session_processes as session_processes,
    store_has_ended as store_has_ended,
)
from rtrain.ray_internals.serving import (
    ReplicaServer as ReplicaServer,
    before_actors as before_actors,
    begin_serve as begin_serve,
    broadcast_results as broadcast_results,
    end_proxies as end_proxies,
    import_serve as import_serve,
    look_every as look_every,
    replace_replica_server as replace_replica_server,
    serve_controller as serve_controller,
    serve_host as serve_host,
    with_version as with_version,
)
