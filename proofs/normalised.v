(* Weights that are divided by their sums: the total variation distance from how much each has changed.
   Used in docs/soundness.md under "Coded attention". *)

Require Import Certk.sums Certk.total_variation.

Section Normalised.
Context {key : Type}.
Variable keys : list key.
Variables u w : key -> R.
Hypothesis used : forall k, In k keys -> 0 <= u k.
Hypothesis real : forall k, In k keys -> 0 <= w k.
Let U := total keys u.
Let Z := total keys w.
Hypothesis some_used : 0 < U.
Hypothesis some_real : 0 < Z.

(* Gains and losses of weights. *)
Definition more := total keys (fun k => Rmax (w k - u k) 0).
Definition less := total keys (fun k => Rmax (u k - w k) 0).

Lemma more_nonneg : 0 <= more.
Proof. apply total_nonneg. intros. apply Rmax_r. Qed.

Lemma less_nonneg : 0 <= less.
Proof. apply total_nonneg. intros. apply Rmax_r. Qed.

Lemma less_le_used : less <= U.
Proof.
  apply total_le. intros k I. apply Rmax_lub; [specialize (real k I); lra | auto].
Qed.

Lemma more_minus_less : more - less = Z - U.
Proof.
  unfold more, less. rewrite <- total_minus. unfold Z, U. rewrite <- total_minus.
  apply total_ext. intros k _. unfold Rmax. repeat destruct Rle_dec; lra.
Qed.

Lemma more_plus_less : more + less = total keys (fun k => Rabs (w k - u k)).
Proof.
  unfold more, less. rewrite <- total_plus. apply total_ext. intros k _.
  unfold Rmax, Rabs. repeat destruct Rle_dec; destruct Rcase_abs; lra.
Qed.

Lemma distance_over_real : U <= Z -> distance keys (share keys u) (share keys w) <= more / Z.
Proof.
  intros L. rewrite distance_is_excess by (rewrite !total_share; fold U Z; lra).
  unfold more, Rdiv. rewrite Rmult_comm, <- total_times.
  apply total_le. intros k I. specialize (used k I). unfold share. fold U Z.
  assert (/ Z <= / U) by (apply Rinv_le_contravar; lra).
  assert (0 < / Z) by now apply Rinv_0_lt_compat.
  apply Rmax_lub.
  - apply Rle_trans with (/ Z * (w k - u k)); [unfold Rdiv; nra|].
    apply Rmult_le_compat_l; [lra | apply Rmax_l].
  - apply Rmult_le_pos; [lra | apply Rmax_r].
Qed.

Lemma distance_over_used : Z <= U -> distance keys (share keys u) (share keys w) <= less / U.
Proof.
  intros L. rewrite distance_swap, distance_is_excess by (rewrite !total_share; fold U Z; lra).
  unfold less, Rdiv. rewrite Rmult_comm, <- total_times.
  apply total_le. intros k I. specialize (real k I). unfold share. fold U Z.
  assert (/ U <= / Z) by (apply Rinv_le_contravar; lra).
  assert (0 < / U) by now apply Rinv_0_lt_compat.
  apply Rmax_lub.
  - apply Rle_trans with (/ U * (u k - w k)); [unfold Rdiv; nra|].
    apply Rmult_le_compat_l; [lra | apply Rmax_l].
  - apply Rmult_le_pos; [lra | apply Rmax_r].
Qed.

(* The larger change over the larger sum. *)
Lemma normalised_changes :
  distance keys (share keys u) (share keys w) <= Rmax more less / Rmax U Z.
Proof.
  assert (0 < / U) by now apply Rinv_0_lt_compat.
  assert (0 < / Z) by now apply Rinv_0_lt_compat.
  destruct (Rle_lt_dec U Z) as [L|L].
  - rewrite (Rmax_right U Z) by lra. eapply Rle_trans; [now apply distance_over_real|].
    apply Rmult_le_compat_r; [lra | apply Rmax_l].
  - rewrite (Rmax_left U Z) by lra. eapply Rle_trans; [apply distance_over_used; lra|].
    apply Rmult_le_compat_r; [lra | apply Rmax_r].
Qed.

(* The sum of all changes over the larger sum. *)
Theorem normalised_sum :
  distance keys (share keys u) (share keys w) <= total keys (fun k => Rabs (w k - u k)) / Rmax U Z.
Proof.
  eapply Rle_trans; [apply normalised_changes|].
  pose proof more_nonneg. pose proof less_nonneg. rewrite <- more_plus_less.
  apply Rmult_le_compat_r; [|apply Rmax_lub; lra].
  left. apply Rinv_0_lt_compat. pose proof (Rmax_l U Z). lra.
Qed.

(* From bounds K and L of both changes and one U_low of the used sum: M / (U_low + M - L) with M = max(K, L). *)
Theorem normalised_bounds K L U_low : more <= K -> less <= L -> 0 < U_low <= U ->
  distance keys (share keys u) (share keys w) <= Rmax K L / (U_low + (Rmax K L - L)).
Proof.
  intros HK HL HU.
  pose proof more_nonneg. pose proof less_nonneg. pose proof less_le_used. pose proof more_minus_less.
  pose proof (Rmax_l K L). pose proof (Rmax_r K L). set (M := Rmax K L) in *.
  (* a / b <= M / (U_low + M - L) where a (U_low + M - L) <= M b. *)
  assert (over : forall a b, 0 < b -> a * (U_low + (M - L)) <= M * b -> a / b <= M / (U_low + (M - L))).
  { intros a b B E. apply Rmult_le_reg_r with b; [easy|].
    replace (a / b * b) with a by (field; lra).
    apply Rmult_le_reg_r with (U_low + (M - L)); [lra|].
    replace (M / (U_low + (M - L)) * b * (U_low + (M - L))) with (M * b) by (field; lra). easy. }
  destruct (Rle_lt_dec U Z) as [D|D].
  - eapply Rle_trans; [now apply distance_over_real|]. apply over; [easy|].
    replace Z with (U + more - less) by lra.
    destruct (Rle_lt_dec L U); nra.
  - eapply Rle_trans; [apply distance_over_used; lra|]. apply over; [easy|].
    destruct (Rle_lt_dec L U); nra.
Qed.
End Normalised.
