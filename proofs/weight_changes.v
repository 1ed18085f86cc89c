(* Weights that change by factors within e^(+-s): the total variation distance is at most tanh(s/2).
   Used in docs/soundness.md under "Two caches". *)

Require Import Certk.sums Certk.total_variation Certk.odds Certk.soft_cap.

Lemma tanh_half s : tanh (s / 2) = (exp s - 1) / (exp s + 1).
Proof.
  unfold tanh, sinh, cosh.
  assert (E : exp s = exp (s / 2) * exp (s / 2)) by (rewrite <- exp_plus; f_equal; field).
  assert (I : exp (- (s / 2)) = / exp (s / 2)) by apply exp_Ropp.
  rewrite E, I. pose proof (exp_pos (s / 2)). field.
  repeat split; try lra; nra.
Qed.

(* The most that a share p gains when its odds grow by the factor e^(2s). *)
Lemma gain_of_odds p s : 0 <= p <= 1 -> 0 <= s ->
  p * exp (2 * s) / (1 - p + p * exp (2 * s)) - p <= tanh (s / 2).
Proof.
  intros P S0. rewrite tanh_half. replace (2 * s) with (s + s) by ring. rewrite exp_plus.
  pose proof (exp_ge_1 s S0). set (a := exp s) in *.
  assert (1 <= a * a) by nra. assert (0 < 1 - p + p * (a * a)) by nra.
  replace (p * (a * a) / (1 - p + p * (a * a)) - p)
    with (p * (1 - p) * (a * a - 1) / (1 - p + p * (a * a))) by (field; lra).
  apply ratio_le; [lra | lra |].
  (* The difference is (a - 1) times a square. *)
  replace (p * (1 - p) * (a * a - 1) * (a + 1)) with ((a - 1) * (p * (1 - p) * (a + 1) * (a + 1))) by ring.
  apply Rmult_le_compat_l; [lra|].
  pose proof (Rle_0_sqr (p * (a + 1) - 1)). unfold Rsqr in *. nra.
Qed.

Lemma tanh_half_le s : 0 <= s -> tanh (s / 2) <= s / 2.
Proof.
  intros S0. pose proof (tanh_lipschitz (s / 2) 0) as L. rewrite tanh_0 in L.
  rewrite !Rminus_0_r, (Rabs_pos_eq (s / 2)) in L by lra. apply abs_bounds in L. lra.
Qed.

Theorem distance_of_factors {key : Type} (keys : list key) (u w : key -> R) s :
  0 <= s -> (forall k, In k keys -> 0 <= u k) -> 0 < total keys u ->
  (forall k, In k keys -> exp (- s) * u k <= w k <= exp s * u k) ->
  distance keys (share keys u) (share keys w) <= tanh (s / 2) <= s / 2.
Proof.
  intros S0 used U W. split; [|now apply tanh_half_le].
  pose proof (exp_pos s). pose proof (exp_pos (- s)).
  assert (one : exp (- s) * exp s = 1) by (rewrite <- exp_plus, Rplus_opp_l; apply exp_0).
  assert (real : forall k, In k keys -> 0 <= w k).
  { intros k I. specialize (used k I). specialize (W k I). nra. }
  (* S gains most. *)
  set (S := gaining (share keys u) (share keys w)).
  destruct (total_within keys w u s S W) as [low_in high_in].
  destruct (total_within keys w u s (out S) W) as [low_out high_out].
  pose proof (part_nonneg S keys u used). pose proof (part_nonneg (out S) keys u used).
  pose proof (part_nonneg S keys w real). pose proof (part_nonneg (out S) keys w real).
  pose proof (total_part S keys u) as U'. pose proof (total_part S keys w) as Z'.
  set (a := total keys (part S u)) in *. set (b := total keys (part (out S) u)) in *.
  set (a' := total keys (part S w)) in *. set (b' := total keys (part (out S) w)) in *.
  assert (0 < total keys w) by nra.
  rewrite distance_is_gain by (rewrite !total_share; lra). fold S.
  rewrite !total_part_share. fold a a'.
  eapply Rle_trans; [|apply (gain_of_odds (a / total keys u) s); [|easy]].
  - apply Rplus_le_compat_r. rewrite U', Z'.
    replace (2 * s) with (s + s) by ring. rewrite exp_plus.
    replace (a / (a + b) * (exp s * exp s) / (1 - a / (a + b) + a / (a + b) * (exp s * exp s)))
      with (a * (exp s * exp s) / (b + a * (exp s * exp s))) by (field; split; nra).
    apply ratio_le; [lra | nra |].
    (* a' b <= a e^(2s) b' *)
    assert (a' * b <= a * (exp s * exp s) * b'); [|nra].
    assert (b <= exp s * b') by nra.
    apply Rle_trans with (exp s * a * (exp s * b')); [apply Rmult_le_compat; nra | nra].
  - rewrite U'. split; [apply Rmult_le_pos; [lra | left; apply Rinv_0_lt_compat; lra]|].
    apply Rmult_le_reg_r with (a + b); [lra|].
    replace (a / (a + b) * (a + b)) with a by (field; lra). lra.
Qed.
