(* Attention that drops keys: the total variation distance from softmax attention is the dropped share.
   Used in docs/soundness.md under "The promise". *)

Require Import Certk.sums Certk.total_variation.

Theorem truncation {key : Type} (keys : list key) (w : key -> R) (S : key -> bool) :
  (forall k, In k keys -> 0 <= w k) -> 0 < total keys (part S w) ->
  distance keys (share keys w) (share keys (part S w)) = total keys (part (out S) w) / total keys w.
Proof.
  intros W H.
  pose proof (part_nonneg (out S) keys w W). pose proof (total_part S keys w).
  rewrite distance_is_excess by (rewrite !total_share; lra).
  rewrite (total_ext _ _ (fun k => part S w k * (/ total keys (part S w) - / total keys w))).
  - rewrite (total_ext _ _ (fun k => (/ total keys (part S w) - / total keys w) * part S w k))
      by (intros; ring).
    rewrite total_times. rewrite H1. field. lra.
  - intros k I. specialize (W k I). unfold share.
    assert (/ total keys w <= / total keys (part S w)) by (apply Rinv_le_contravar; lra).
    assert (0 < / total keys w) by (apply Rinv_0_lt_compat; lra).
    unfold part at 1 3. destruct (S k); unfold Rdiv.
    + rewrite Rmax_left by nra. ring.
    + rewrite Rmax_right by nra. ring.
Qed.
