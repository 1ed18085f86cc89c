(* Weights with relative errors: the total variation distance, and the distance of averages.
   Used in docs/soundness.md under "Output of attention". *)

Require Import Certk.sums Certk.total_variation.

Section Relative.
Context {key : Type}.
Variable keys : list key.
(* Real shares, and the relative error of each weight. *)
Variables P error : key -> R.
Variable most : R.
Hypothesis shares : forall k, In k keys -> 0 <= P k.
Hypothesis whole : total keys P = 1.
Hypothesis bounded : forall k, In k keys -> Rabs (error k) <= most.
Hypothesis small : 0 <= most < 1.

Definition mean : R := total keys (fun k => P k * error k).
Definition off (k : key) : R := P k * (1 + error k).

Lemma mean_bound : - most <= mean <= most.
Proof.
  unfold mean. split.
  - replace (- most) with (- most * total keys P) by (rewrite whole; ring). rewrite <- total_times.
    apply total_le. intros k I. destruct (abs_bounds _ _ (bounded k I)). specialize (shares k I). nra.
  - replace most with (most * total keys P) by (rewrite whole; ring). rewrite <- total_times.
    apply total_le. intros k I. destruct (abs_bounds _ _ (bounded k I)). specialize (shares k I). nra.
Qed.

Lemma total_off : total keys off = 1 + mean.
Proof.
  replace (1 + mean) with (total keys P + mean) by (rewrite whole; ring).
  unfold off, mean. rewrite <- total_plus. apply total_ext. intros. ring.
Qed.

Lemma relative_distance :
  distance keys P (share keys off) = total keys (fun k => P k * Rabs (error k - mean)) / (2 + 2 * mean).
Proof.
  pose proof mean_bound. unfold distance, share. rewrite total_off.
  rewrite (total_ext _ _ (fun k => / (1 + mean) * (P k * Rabs (error k - mean)))).
  - rewrite total_times. field. lra.
  - intros k I. specialize (shares k I). unfold off.
    replace (P k - P k * (1 + error k) / (1 + mean)) with (/ (1 + mean) * (P k * - (error k - mean))) by (field; lra).
    rewrite !Rabs_mult, Rabs_Ropp, (Rabs_pos_eq (P k)), Rabs_pos_eq by (easy || left; apply Rinv_0_lt_compat; lra).
    reflexivity.
Qed.

(* Numbers between -most and most are in the mean at most that far from their mean. *)
Lemma mean_distance : total keys (fun k => P k * Rabs (error k - mean)) <= most.
Proof.
  set (a := total keys (fun k => P k * Rabs (error k - mean))).
  assert (a0 : 0 <= a) by (apply total_nonneg; intros k I; apply Rmult_le_pos; [auto | apply Rabs_pos]).
  enough (a * a <= most * most) by nra.
  (* The square of the mean is at most the mean of squares: the mean of (|error - mean| - a)^2 is not negative. *)
  assert (V : total keys (fun k => P k * ((error k - mean) * (error k - mean))) <= most * most).
  { rewrite (total_ext _ _ (fun k => (P k * (error k * error k) - 2 * mean * (P k * error k)) + mean * mean * P k))
      by (intros; ring).
    rewrite total_plus, total_minus, !total_times, whole. fold mean.
    assert (total keys (fun k => P k * (error k * error k)) <= most * most * total keys P); [|rewrite whole in *; nra].
    rewrite <- total_times. apply total_le. intros k I. destruct (abs_bounds _ _ (bounded k I)).
    specialize (shares k I). assert (error k * error k <= most * most) by nra. nra. }
  assert (S : 0 <= total keys (fun k => P k * ((Rabs (error k - mean) - a) * (Rabs (error k - mean) - a)))).
  { apply total_nonneg. intros k I. apply Rmult_le_pos; [auto | apply square_nonneg]. }
  rewrite (total_ext _ _ (fun k =>
    (P k * ((error k - mean) * (error k - mean)) - 2 * a * (P k * Rabs (error k - mean))) + a * a * P k)) in S.
  - rewrite total_plus, total_minus, !total_times, whole in S. fold a in S. nra.
  - intros k _.
    assert (Rabs (error k - mean) * Rabs (error k - mean) = (error k - mean) * (error k - mean)) as <-
      by (rewrite <- Rabs_mult; apply Rabs_pos_eq, square_nonneg). ring.
Qed.

Theorem relative_bound : distance keys P (share keys off) <= most / (2 - 2 * most).
Proof.
  rewrite relative_distance. pose proof mean_bound. pose proof mean_distance.
  apply Rmult_le_compat; [|left; apply Rinv_0_lt_compat; lra | easy | apply Rinv_le_contravar; lra].
  apply total_nonneg. intros k I. apply Rmult_le_pos; [auto | apply Rabs_pos].
Qed.
End Relative.
