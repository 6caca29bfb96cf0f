"""Which test shows that a fault which users of other engines and gateways reported is none here.

`k8s N`: the numbered reports of research/k8s.md, section 2 (routers, operators and charts for Kubernetes);
`TN`: the small reproductions of research/freetoken.md, section 2.12. Tests are named below tests/.
"""

SHOWN: dict[str, tuple[str, ...]] = {
    # Where workers are, and which of them are there.
    "k8s 1": ("gateway/test_dispatcher_processes.py::test_kill_with_a_second_worker",),
    "k8s 2": (
        "gateway/test_discovery.py::test_a_pod_that_is_deleted_gets_nothing_new_and_finishes_what_it_has",
    ),
    "k8s 3": ("gateway/test_discovery.py::test_a_ready_pod_whose_worker_is_not_gets_nothing",),
    "k8s 4": ("gateway/test_link.py::test_a_worker_that_does_not_say_what_it_serves_holds_up_no_other",),
    "k8s 5": ("gateway/test_dispatcher_processes.py::test_a_stopped_worker_is_left_in_time_and_taken_back",),
    "k8s 6": (
        "gateway/test_discovery.py::test_hundreds_of_pods_that_come_and_go",
        "gateway/test_dispatcher.py::test_random_deaths_change_no_token",
    ),
    "k8s 7": (
        "cluster_api/test_pods.py::test_an_evicted_pod_is_over",
        "gateway/test_discovery.py::test_a_pod_without_an_address_is_no_worker_yet",
    ),
    "k8s 8": ("cluster_api/test_reflector.py::test_what_happens_between_two_watches_is_not_missed",),
    "k8s 9": ("gateway/test_discovery.py::test_a_pod_that_leaves_the_selector_is_no_worker",),
    "k8s 10": ("cluster_api/test_reflector.py::test_a_silent_watch_heals",),
    "k8s 11": ("cluster_api/test_reflector.py::test_lists_are_repeated_whatever_the_watch_says",),
    "k8s 12": ("gateway/test_link.py::test_a_worker_that_comes_back_on_its_address_rejoins_soon",),
    "k8s 13": (
        "gateway/test_discovery.py::test_a_late_word_about_the_pod_before_does_not_remove_the_one_that_is_there",
    ),
    "k8s 14": ("cluster_api/test_reflector.py::test_a_version_that_is_gone_leads_to_a_list",),
    "k8s 15": ("gateway/test_discovery.py::test_another_pod_at_the_same_address_is_another_worker",),
    "k8s 16": ("gateway/test_prefix_index.py::test_what_is_known_of_an_incarnation_goes_with_it",),
    "k8s 17": ("gateway/test_gateway_workers.py::test_with_no_worker_it_says_so_at_the_clients_deadline",),
    "k8s 19": (
        "gateway/test_discovery.py::test_a_gateway_serves_its_last_known_workers_while_the_api_server_is_away",
    ),
    "k8s 20": ("gateway/test_discovery.py::test_a_rollout_is_never_without_a_worker_and_breaks_no_stream",),
    # Health.
    "k8s 25": ("gateway/test_health.py::test_ready_with_a_worker_and_not_without",),
    "k8s 28": ("gateway/test_health.py::test_alive_whatever_the_workers_do",),
    "k8s 31": (
        "gateway/test_discovery.py::test_a_gateway_serves_its_last_known_workers_while_the_api_server_is_away",
    ),
    "k8s 32": ("gateway/test_link.py::test_a_frame_that_makes_no_sense_costs_the_stream_and_not_the_worker",),
    "k8s 33": ("gateway/test_link.py::test_series_exist_before_anything_happened",),
    "k8s 34": ("gateway/test_reported_cases.py::test_what_is_no_worker_at_a_workers_address_harms_nobody",),
    "k8s 35": ("gateway/test_reported_cases.py::test_probes_are_answered_while_a_hundred_streams_run",),
    # The end of a gateway, and of a worker that is asked to go.
    "k8s 42": ("gateway/test_api_process.py::test_sigterm_drains_and_exits_with_zero",),
    "k8s 43": ("gateway/test_api_streams.py::test_draining_finishes_what_runs_and_admits_nothing",),
    "k8s 44": ("gateway/test_breakers.py::test_a_drain_s_deadline_moves_what_is_left",),
    # Clients that leave.
    "k8s 46": (
        "gateway/test_api_streams.py::test_a_client_that_leaves_ends_its_generation",
        "gateway/test_gateway_workers.py::test_a_client_that_leaves_frees_its_slot",
    ),
    "k8s 47": ("gateway/test_dispatcher_endings.py::test_a_thousand_generations_with_aborts_leave_nothing",),
    "k8s 48": ("gateway/test_dispatcher.py::test_a_silent_worker_loses_its_streams_in_time",),
    "k8s 49": (
        "gateway/test_dispatcher_endings.py::test_closing_cancels_at_the_worker",
        "gateway/test_dispatcher_endings.py::test_cancelling_the_consumer_cancels_at_the_worker",
        "worker/front/test_worker_serving.py::test_cancel_frees_soon",
    ),
    # What is tried again, where, and for how long.
    "k8s 50": ("gateway/test_breakers.py::test_what_counts_against_a_worker",),
    "k8s 51": (
        "gateway/test_dispatcher_backpressure.py::test_backpressure_goes_elsewhere_and_never_strikes_or_ejects",
    ),
    "k8s 52": ("gateway/test_breakers.py::test_one_that_refuses_is_not_asked_by_the_next_request_first",),
    "k8s 53": (
        "gateway/test_dispatcher_endings.py::test_no_worker_until_the_deadline",
        "gateway/test_dispatcher_processes.py::test_kill_of_the_only_worker_pauses_until_it_is_back",
    ),
    "k8s 54": ("gateway/test_breakers.py::test_a_worker_with_the_prefix_that_is_dead_is_tried_once",),
    "k8s 55": (
        "gateway/test_dispatcher.py::test_poison_is_isolated_and_its_neighbours_finish",
        "gateway/test_dispatcher_processes.py::test_poison_that_takes_whole_processes_is_given_up_in_the_end",
    ),
    "k8s 56": ("gateway/test_recovery.py::test_a_request_that_lost_its_worker_waits_for_room",),
    "k8s 57": ("gateway/test_openai.py::test_an_error_in_a_stream_is_raised_behind_its_text",),
    "k8s 58": (
        "gateway/test_validation.py::test_bodies",
        "gateway/test_dispatcher_backpressure.py::test_a_wrong_request_fails_at_once_and_harms_nobody",
    ),
    "k8s 59": (
        "gateway/test_openai.py::test_error_classes",
        "gateway/test_openai.py::test_a_poisoned_request_is_not_sent_again_by_the_client",
    ),
    # Streams that move.
    "k8s 60": (
        "gateway/test_killed_everywhere.py::test_the_whole_answer_is_the_undisturbed_one",
        "integration/test_sim_structured.py::test_a_fault_in_the_middle_does_not_show",
        "gateway/test_gateway_workers.py::test_both_choices_of_a_request_go_on",
    ),
    "k8s 61": ("gateway/test_gateway_workers.py::test_a_stop_string_is_found_across_a_death",),
    "k8s 62": ("gateway/test_recovery.py::test_unexplained_deaths_are_endured_longer",),
    "k8s 63": ("worker/front/test_worker_serving.py::test_pings_do_not_end_a_quiet_connection",),
    "k8s 64": ("worker/front/test_worker_serving.py::test_garbage_on_the_port_leaves_it_alive",),
    # Streams on the wire.
    "k8s 65": ("gateway/test_api_streams.py::test_a_stream_on_the_wire",),
    "k8s 66": ("gateway/fuzz/test_streams.py::test_streams_are_read_by_others",),
    "k8s 67": ("gateway/test_api_streams.py::test_an_error_after_it_is_the_last_event",),
    "k8s 68": ("gateway/test_openai.py::test_usage_comes_last_and_is_null_before",),
    "k8s 69": (
        "gateway/parsing/test_goldens.py::test_cut_at_every_character",
        "gateway/api/test_chat.py::test_a_call_that_is_cut_off_is_no_call",
    ),
    "k8s 70": (
        "gateway/test_detokenizer.py::test_a_delta_comes_with_the_token_that_completes_its_character",
        "gateway/test_killed_everywhere.py::test_the_whole_answer_is_the_undisturbed_one",
    ),
    # Memory and load.
    "k8s 72": (
        "gateway/test_dispatcher_endings.py::test_a_thousand_generations_with_aborts_leave_nothing",
        "gateway/test_prefix_index.py::test_it_is_bounded_and_keeps_what_is_used",
    ),
    "k8s 73": ("gateway/test_memory.py::test_failing_requests_leave_nothing",),
    "k8s 74": ("gateway/test_metrics_http.py::test_requests_by_route_code_and_stream",),
    "k8s 77": (
        "gateway/admission/test_forecast.py::test_where_a_cache_s_size_is_not_known_only_places_count",
    ),
    "k8s 79": ("gateway/test_reported_cases.py::test_requests_that_no_worker_is_there_for_are_seen",),
    "k8s 80": (
        "gateway/admission/test_gate.py::test_with_no_worker_all_wait_for_one",
        "gateway/test_health.py::test_a_model_that_is_not_known_yet_is_no_reason_to_give_up",
    ),
    "k8s 81": (
        "gateway/auth/test_http_keys.py::test_every_route_but_the_probes_needs_a_key",
        "gateway/test_api_process.py::test_no_key_is_in_the_log_wherever_a_client_puts_it",
    ),
    "k8s 85": (
        "gateway/admission/test_fair_queue.py::test_a_flood_of_one_client_does_not_hold_up_another",
        "gateway/admission/test_gate.py::test_the_urgent_go_first",
    ),
    # A server for one user, with agents as its clients.
    "T1": ("faults/test_scenarios.py::test_streams_outlive",),
    "T2": ("worker/front/test_worker_deaths.py::test_a_step_that_raises_fails_its_batch_and_nothing_else",),
    "T3": ("worker/front/test_worker_deaths.py::test_a_step_that_hangs_is_stalled",),
    "T4": ("gateway/test_health.py::test_a_broken_tokenizer_is_said_and_a_mended_one_serves",),
    "T5": (
        "gateway/test_health.py::test_not_ready_before_the_tokenizer_is_loaded",
        "gateway/test_health.py::test_alive_whatever_the_workers_do",
    ),
    "T6": (
        "worker/front/test_worker_deaths.py::test_engines_that_die_at_the_start_are_started_ever_more_slowly",
        "gateway/test_link.py::test_a_worker_that_attaches_only_to_fail_is_tried_with_growing_pauses",
    ),
    "T7": (
        "gateway/fuzz/test_worker_frames.py::test_a_garbling_worker_costs_nobody_else",
        "gateway/fuzz/test_front_frames.py::test_a_garbling_gateway_costs_nobody_else",
        "worker/front/test_framing.py::test_frames_survive_any_cut",
    ),
    "T8": ("worker/sim/test_sim_worker.py::test_the_command_hosts_workers_until_it_is_told_to_stop",),
    "T9": ("gateway/test_api_process.py::test_what_is_left_at_the_end_of_the_grace_is_told_so",),
    "T10": ("gateway/test_reported_cases.py::test_a_prompt_beyond_the_context_is_a_400_at_once",),
    "T11": (
        "gateway/test_validation.py::test_the_context_is_a_limit",
        "gateway/test_reported_cases.py::test_who_names_no_limit_does_not_reserve_the_whole_cache",
    ),
    "T12": ("gateway/test_validation.py::test_refused_by_name",),
    "T13": (
        "gateway/test_openai.py::test_parameters_reach_the_worker",
        "gateway/test_link.py::test_all_sampling_fields_travel",
    ),
    "T14": (
        "gateway/test_openai.py::test_models",
        "gateway/test_link.py::test_a_model_has_the_least_context_of_its_workers",
    ),
    "T15": (
        "gateway/api/test_structured.py::test_what_cannot_be_enforced_is_refused_where_it_stands",
        "integration/test_sim_structured.py::test_a_fault_in_the_middle_does_not_show",
    ),
    "T16": ("gateway/parsing/test_goldens.py::test_cut_at_every_character",),
    "T17": ("gateway/parsing/test_calls.py::test_what_is_no_call_is_text",),
    "T18": ("gateway/parsing/test_calls.py::test_text_between_and_behind_calls_is_content",),
    "T19": (
        "gateway/parsing/test_goldens.py::test_cut_short_at_every_character",
        "gateway/api/test_chat.py::test_a_call_that_is_cut_off_is_no_call",
    ),
    "T20": ("gateway/parsing/test_schema.py::test_properties_behind_references_and_alternatives",),
    "T21": (
        "gateway/api/test_chat.py::test_reasoning_is_turned_off_with_tools_too",
        "gateway/parsing/test_calls.py::test_a_family_without_reasoning_cannot_start_in_it",
        "gateway/api/test_answer_grammar.py::test_reasoning_ends_at_its_budget",
    ),
    "T22": (
        "gateway/test_reported_cases.py::test_odd_conversations_are_answered",
        "gateway/test_reported_cases.py::test_a_tools_answer_that_nobody_asked_for_is_no_defect",
    ),
    "T23": (
        "gateway/api/test_messages.py::test_the_order_of_events",
        "gateway/test_reported_cases.py::test_what_is_counted_before_is_what_is_used",
    ),
    "T24": (
        "gateway/test_stop.py::test_the_cuts_make_no_difference",
        "gateway/api/test_chat.py::test_stop_strings_are_looked_for_in_what_is_said",
    ),
    "T25": ("gateway/api/test_messages.py::test_an_attribution_that_changes_leaves_the_prompt_as_it_is",),
}

# Those that no gateway could have or mend: of charts, of controllers, and of engines.
ELSEWHERE: dict[str, str] = {
    "k8s 18": "replicas and disruption budgets: the chart",
    "k8s 21": "pods that a rollout handles: the controller",
    "k8s 22": "an engine that dies behind its API: the worker's front",
    "k8s 23": "an engine that hangs: the worker's front",
    "k8s 24": "an engine without progress: the worker's front",
    "k8s 26": "an engine that is taken for dead while it works: the worker's front and the controller",
    "k8s 27": "liveness of a worker: its front",
    "k8s 29": "probes that generate: there are none",
    "k8s 30": "commands of probes: the chart",
    "k8s 36": "time to load: the chart",
    "k8s 37": "settings of probes: the chart",
    "k8s 38": "pods that wait for images: the controller",
    "k8s 39": "downloads of models: the worker and the chart",
    "k8s 40": "grace periods: the chart",
    "k8s 41": "grace periods: the chart",
    "k8s 45": "rollouts without a spare GPU: the chart",
    "k8s 71": "Envoy's external processing: there is none",
    "k8s 75": "ports of monitors: the chart",
    "k8s 76": "dashboards",
    "k8s 78": "sidecars: there are none",
    "k8s 82": "names and volumes: the chart",
    "k8s 83": "status of objects: there are none of our own",
    "k8s 84": "lost GPUs: the controller",
}
