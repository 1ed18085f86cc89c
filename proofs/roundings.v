(* Factors near 1: their products, sums of terms with them, and ratios of such sums.
   Used in docs/soundness.md under "Four lemmas". *)

Require Import Certk.sums Certk.exponential.

(* A factor that is off by d. *)
Definition near (f d : R) : Prop := 1 - Rabs d <= f /\ f * (1 - Rabs d) <= 1.

Lemma near_plus d : Rabs d < 1 -> near (1 + d) d.
Proof.
  intros S.
  pose proof (Rle_abs d). pose proof (Rle_abs (- d)). rewrite Rabs_Ropp in *. pose proof (Rabs_pos d).
  split; [lra|]. destruct (Rle_lt_dec 0 d); [rewrite Rabs_pos_eq | rewrite Rabs_left]; nra.
Qed.

Lemma near_inverse d : Rabs d < 1 -> near (/ (1 - d)) d.
Proof.
  intros S. pose proof (abs_bounds d _ (Rle_refl _)).
  assert (0 < 1 - d) by lra. pose proof (Rinv_0_lt_compat _ H0).
  assert (E : / (1 - d) * (1 - d) = 1) by (field; lra).
  split; [|nra].
  apply Rmult_le_reg_r with (1 - d); [easy|]. rewrite E.
  destruct (Rle_lt_dec 0 d); [rewrite Rabs_pos_eq | rewrite Rabs_left]; nra.
Qed.

Lemma near_exp d : Rabs d < 1 -> near (exp d) d.
Proof.
  intros S. pose proof (abs_bounds d _ (Rle_refl _)). split.
  - pose proof (exp_ge_line d). lra.
  - apply Rle_trans with (exp d * exp (- d)).
    + apply Rmult_le_compat_l; [left; apply exp_pos|]. pose proof (exp_ge_line (- d)). lra.
    + rewrite <- exp_plus, Rplus_opp_r, exp_0. lra.
Qed.

(* The factors of the page. *)
Definition factor_of d f := f = 1 + d \/ f = / (1 - d) \/ f = exp d.

Lemma near_factor f d : Rabs d < 1 -> factor_of d f -> near f d.
Proof. intros S [->|[->| ->]]; auto using near_plus, near_inverse, near_exp. Qed.

(* The product over a list of factors, each beside how far it is off, and the sum of that. *)
Fixpoint product (factors : list (R * R)) : R :=
  match factors with [] => 1 | (f, _) :: rest => f * product rest end.
Definition sizes (factors : list (R * R)) : R := total factors (fun each => Rabs (snd each)).

Theorem product_of_factors factors S :
  (forall f d, In (f, d) factors -> factor_of d f) -> sizes factors <= S < 1 ->
  1 - S <= product factors <= / (1 - S).
Proof.
  intros N B.
  assert (I : 1 - sizes factors <= product factors /\ product factors * (1 - sizes factors) <= 1).
  { assert (sizes factors < 1) by lra. clear B. revert H N. unfold sizes.
    induction factors as [|[f d] rest IH]; simpl; intros L N; [lra|].
    set (s := total rest (fun each => Rabs (snd each))) in *.
    assert (0 <= s) by (apply total_nonneg; intros; apply Rabs_pos). pose proof (Rabs_pos d).
    destruct (near_factor f d) as [Nl Nu]; [lra | apply N; now left |].
    destruct IH as [Il Iu]; [lra | intros; apply N; now right |].
    set (P := product rest) in *.
    assert (0 < f) by lra. assert (0 < P) by lra. split.
    - apply Rle_trans with ((1 - Rabs d) * (1 - s)); [nra | apply Rmult_le_compat; lra].
    - apply Rle_trans with (f * P * ((1 - Rabs d) * (1 - s))).
      + apply Rmult_le_compat_l; nra.
      + replace (f * P * ((1 - Rabs d) * (1 - s))) with ((f * (1 - Rabs d)) * (P * (1 - s))) by ring.
        replace 1 with (1 * 1) at 3 by ring. apply Rmult_le_compat; nra. }
  split; [lra|].
  apply Rmult_le_reg_r with (1 - S); [lra|]. rewrite Rinv_l by lra.
  destruct I. assert (0 <= product factors) by lra. nra.
Qed.

(* Terms >= 0 with factors within 1 +- a have a sum within 1 +- a of theirs. *)
Theorem sum_of_roundings {key : Type} (keys : list key) (term factor : key -> R) a :
  (forall k, In k keys -> 0 <= term k) -> (forall k, In k keys -> 1 - a <= factor k <= 1 + a) ->
  (1 - a) * total keys term <= total keys (fun k => term k * factor k) <= (1 + a) * total keys term.
Proof.
  intros T B. rewrite <- !total_times. split; apply total_le; intros k I;
    specialize (T k I); specialize (B k I); nra.
Qed.

(* Two numbers, each within 1 +- a of another, have a ratio within a factor (1+a)/(1-a) of the others'. *)
Theorem ratio_of_roundings p q p' q' a : 0 <= a < 1 -> 0 < q ->
  0 <= p -> p * (1 - a) <= p' <= p * (1 + a) -> q * (1 - a) <= q' <= q * (1 + a) ->
  p / q / ((1 + a) / (1 - a)) <= p' / q' <= p / q * ((1 + a) / (1 - a)).
Proof.
  intros A Q P0 P B. assert (0 < q * (1 - a)) by nra. assert (0 < q') by lra.
  replace (p / q / ((1 + a) / (1 - a))) with ((p * (1 - a)) / (q * (1 + a))) by (field; lra).
  replace (p / q * ((1 + a) / (1 - a))) with ((p * (1 + a)) / (q * (1 - a))) by (field; lra).
  split; (apply Rmult_le_compat; [nra | left; apply Rinv_0_lt_compat; nra | lra | apply Rinv_le_contravar; lra]).
Qed.
