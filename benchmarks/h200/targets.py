"""What the suite is to reach on an H200 (141 GB)."""

from collections.abc import Mapping

TARGETS: Mapping[str, str] = {
    "g1_mfu": ">= 0.45",
    "g1_of_gemm": ">= 0.56",
    "g1_peak_gib": "<= 90",
    "g1_padded_ratio": ">= 3",
    "g1_recomputed_mfu": ">= 0.36",
    "g1_recomputed_peak_gib": "<= 45",
    "g1b_tokens_per_s": ">= 30000",
    "g1b_peak_gib": "<= 24",
    "g2_ms": "<= 110",
    "g2_extra_gib": "<= 1.6",
    "g2_error": "<= 0.001",
    "g2_memory_against_naive": ">= 40",
    "g2_trl_ratio": ">= 4",
    "g2_liger_ratio": ">= 1",
    "g2_cce_ratio": ">= 1",
    "g3_of_roofline": ">= 0.5",
    "g3_one_row_tokens_per_s": ">= 700",
    "g3_mean_error": "<= 0.005",
    "g3_generate_ratio": ">= 5",
    "g4_ms": "<= 2.5",
    "g5_speed_up": ">= 2.6",
    "g6_generate_and_train_share": ">= 0.9",
    "g6_sync_share": "<= 0.01",
    "g6_peak_gib": "<= 110",
}
