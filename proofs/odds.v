(* From computed sums of kept and dropped weights to an interval for the dropped share.
   Used in docs/soundness.md under "From sums to an interval" and under "One set for many rows" and under "Keys that are not here". *)

Require Import Certk.sums.

(* The share that has these odds. *)
Definition share_of_odds (odds : R) : R := odds / (1 + odds).

Lemma share_of_odds_grows a b : 0 <= a -> a <= b -> share_of_odds a <= share_of_odds b.
Proof.
  intros A L. unfold share_of_odds.
  replace (a / (1 + a)) with (1 - / (1 + a)) by (field; lra).
  replace (b / (1 + b)) with (1 - / (1 + b)) by (field; lra).
  assert (/ (1 + b) <= / (1 + a)) by (apply Rinv_le_contravar; lra). lra.
Qed.

Lemma share_is_of_odds dropped kept : 0 <= dropped -> 0 < kept ->
  dropped / (dropped + kept) = share_of_odds (dropped / kept).
Proof. intros D H. unfold share_of_odds. field. lra. Qed.

(* Of dropped keys that weigh at most U beside kept ones that weigh at least L. *)
Theorem share_of_bounds dropped kept U L :
  0 <= dropped <= U -> 0 < L <= kept -> dropped / (dropped + kept) <= U / (U + L).
Proof.
  intros D H. rewrite !share_is_of_odds by lra. apply share_of_odds_grows.
  - apply Rmult_le_pos; [lra | left; apply Rinv_0_lt_compat; lra].
  - apply Rmult_le_compat; [lra | left; apply Rinv_0_lt_compat; lra | lra | apply Rinv_le_contravar; lra].
Qed.

Lemma exp_ge_1 r : 0 <= r -> 1 <= exp r.
Proof. intros R0. pose proof (exp_ineq1_le r). lra. Qed.

(* Weights within e^(+-r) of others have sums within e^(+-r) of theirs. *)
Lemma total_within {key : Type} (keys : list key) (w v : key -> R) r S :
  (forall k, In k keys -> exp (- r) * v k <= w k <= exp r * v k) ->
  exp (- r) * total keys (part S v) <= total keys (part S w) <= exp r * total keys (part S v).
Proof.
  intros W. rewrite <- !total_times. split; apply total_le; intros k I; specialize (W k I);
    unfold part; destruct (S k); lra.
Qed.

(* T and H are what dropped and kept keys weigh. T' and H' are the computed sums of weights that differ from the real ones by
   factors within e^(+-r): each sum has a relative error of at most a, and what was flushed to 0 adds up to at most F. *)
Section Interval.
Variables T H T' H' a r slack F G : R.
Hypothesis sums : 0 <= T /\ 0 < H /\ 0 <= T' /\ 0 < H'.
Hypothesis error : 0 <= a < 1.
Hypothesis flushed : 0 <= F /\ 0 <= G.
Hypothesis enough : (1 + a) / (1 - a) <= 1 + slack.

Let growth : 0 < exp r /\ 0 < exp (- r) /\ exp (- r) * exp r = 1.
Proof. rewrite <- exp_plus, Rplus_opp_l, exp_0. pose proof (exp_pos r). pose proof (exp_pos (- r)). lra. Qed.

Lemma ratio_le p q x y : 0 < q -> 0 < y -> p * y <= x * q -> p / q <= x / y.
Proof.
  intros Q Y E. apply Rmult_le_reg_r with q; [easy|].
  replace (p / q * q) with p by (field; lra).
  apply Rmult_le_reg_r with y; [easy|].
  replace (x / y * q * y) with (x * q) by (field; lra). easy.
Qed.

Let wide : 1 + a <= (1 + slack) * (1 - a).
Proof.
  apply Rmult_le_reg_r with (/ (1 - a)); [apply Rinv_0_lt_compat; lra|].
  replace ((1 + slack) * (1 - a) * / (1 - a)) with (1 + slack) by (field; lra). exact enough.
Qed.


Theorem interval_upper :
  T <= exp r * (T' / (1 - a) + F) -> exp (- r) * (H' / (1 + a)) <= H ->
  T / (T + H) <= share_of_odds ((T' + F) / H' * ((1 + slack) * exp (2 * r))).
Proof.
  intros BT BH. destruct growth as [g1 [g2 g3]].
  rewrite share_is_of_odds by lra. apply share_of_odds_grows.
  - apply Rmult_le_pos; [lra | left; apply Rinv_0_lt_compat; lra].
  - replace (2 * r) with (r + r) by ring. rewrite exp_plus.
    replace ((T' + F) / H' * ((1 + slack) * (exp r * exp r)))
      with ((exp r * (T' + F) * (1 + slack) * exp r) / H') by (field; lra).
    apply ratio_le; try lra.
    (* T (1 - a) <= e^r (T' + F) and H' <= e^r H (1 + a) *)
    assert (bT : T * (1 - a) <= exp r * (T' + F)).
    { apply Rle_trans with (exp r * (T' / (1 - a) + F) * (1 - a)); [apply Rmult_le_compat_r; lra|].
      replace (exp r * (T' / (1 - a) + F) * (1 - a)) with (exp r * (T' + F * (1 - a))) by (field; lra).
      apply Rmult_le_compat_l; nra. }
    assert (bH : H' <= exp r * H * (1 + a)).
    { apply Rle_trans with (exp r * (exp (- r) * (H' / (1 + a))) * (1 + a)).
      - replace (exp r * (exp (- r) * (H' / (1 + a))) * (1 + a)) with ((exp (- r) * exp r) * H') by (field; lra).
        rewrite g3. lra.
      - apply Rmult_le_compat_r; [lra|]. apply Rmult_le_compat_l; lra. }
    assert (0 <= exp r * (T' + F)) by (apply Rmult_le_pos; lra).
    assert (0 <= exp r * H) by (apply Rmult_le_pos; lra).
    apply Rle_trans with (T * (exp r * H * (1 + a))); [apply Rmult_le_compat_l; lra|].
    apply Rle_trans with (T * (exp r * H * ((1 + slack) * (1 - a)))).
    + apply Rmult_le_compat_l; [lra|]. apply Rmult_le_compat_l; lra.
    + replace (T * (exp r * H * ((1 + slack) * (1 - a)))) with ((T * (1 - a)) * (exp r * H * (1 + slack))) by ring.
      replace (exp r * (T' + F) * (1 + slack) * exp r * H) with ((exp r * (T' + F)) * (exp r * H * (1 + slack))) by ring.
      apply Rmult_le_compat_r; [apply Rmult_le_pos; nra | easy].
Qed.

Theorem interval_lower :
  exp (- r) * (T' / (1 + a)) <= T -> H <= exp r * (H' / (1 - a) + G) ->
  share_of_odds (T' / (H' + G) / ((1 + slack) * exp (2 * r))) <= T / (T + H).
Proof.
  intros BT BH. destruct growth as [g1 [g2 g3]].
  assert (0 < 1 + slack) by nra.
  replace (2 * r) with (r + r) by ring. rewrite exp_plus.
  assert (0 < exp r * exp r) by nra.
  rewrite share_is_of_odds by lra. apply share_of_odds_grows.
  - apply Rmult_le_pos.
    + apply Rmult_le_pos; [lra | left; apply Rinv_0_lt_compat; lra].
    + left. apply Rinv_0_lt_compat. nra.
  - replace (T' / (H' + G) / ((1 + slack) * (exp r * exp r)))
      with (T' / (((1 + slack) * exp r) * (exp r * (H' + G)))) by (field; repeat split; lra).
    apply ratio_le; try lra; [apply Rmult_lt_0_compat; nra|].
    assert (bH : H * (1 - a) <= exp r * (H' + G)).
    { apply Rle_trans with (exp r * (H' / (1 - a) + G) * (1 - a)); [apply Rmult_le_compat_r; lra|].
      replace (exp r * (H' / (1 - a) + G) * (1 - a)) with (exp r * (H' + G * (1 - a))) by (field; lra).
      apply Rmult_le_compat_l; nra. }
    assert (bT : T' <= exp r * T * (1 + a)).
    { apply Rle_trans with (exp r * (exp (- r) * (T' / (1 + a))) * (1 + a)).
      - replace (exp r * (exp (- r) * (T' / (1 + a))) * (1 + a)) with ((exp (- r) * exp r) * T') by (field; lra).
        rewrite g3. lra.
      - apply Rmult_le_compat_r; [lra|]. apply Rmult_le_compat_l; lra. }
    assert (0 <= exp r * T) by (apply Rmult_le_pos; lra).
    apply Rle_trans with (exp r * T * (1 + a) * H); [apply Rmult_le_compat_r; lra|].
    apply Rle_trans with (exp r * T * ((1 + slack) * (1 - a)) * H).
    + apply Rmult_le_compat_r; [lra|]. apply Rmult_le_compat_l; lra.
    + replace (exp r * T * ((1 + slack) * (1 - a)) * H) with ((exp r * T * (1 + slack)) * (H * (1 - a))) by ring.
      replace (T * ((1 + slack) * exp r * (exp r * (H' + G)))) with ((exp r * T * (1 + slack)) * (exp r * (H' + G))) by ring.
      apply Rmult_le_compat_l; [nra | easy].
Qed.
End Interval.

(* The rest of a row, from the computed sums Z' of all keys and A' of some. Both have a relative error of at most a; what was
   flushed adds up to at most F and G. *)
Theorem rest_of_row Z A Z' A' a off F G :
  0 <= a < 1 -> a / (1 - a) <= off -> 0 <= Z' -> 0 <= A' ->
  Z' / (1 + a) <= Z <= Z' / (1 - a) + F -> A' / (1 + a) <= A <= A' / (1 - a) + G ->
  Z' * (1 - off) - A' * (1 + off) - G <= Z - A <= Z' * (1 + off) + F - A' * (1 - off).
Proof.
  intros a01 O Z0 A0 HZ HA.
  assert (below : forall x, 0 <= x -> x * (1 - off) <= x / (1 + a)).
  { intros x X. apply Rmult_le_compat_l; [easy|].
    replace (/ (1 + a)) with (1 - a / (1 + a)) by (field; lra).
    assert (a / (1 + a) <= a / (1 - a)) by (apply Rmult_le_compat_l; [lra | apply Rinv_le_contravar; lra]). lra. }
  assert (above : forall x, 0 <= x -> x / (1 - a) <= x * (1 + off)).
  { intros x X. apply Rmult_le_compat_l; [easy|].
    replace (/ (1 - a)) with (1 + a / (1 - a)) by (field; lra). lra. }
  pose proof (below Z' Z0). pose proof (above Z' Z0). pose proof (below A' A0). pose proof (above A' A0). lra.
Qed.
