(* Soft caps: c tanh(x/c) moves by at most as much as x does.
   Used in docs/soundness.md under "Products q.k". *)

Require Import Arith Certk.sums Certk.exponential.

Lemma cosh_pos y : 0 < cosh y.
Proof. unfold cosh. pose proof (exp_pos y). pose proof (exp_pos (- y)). lra. Qed.

Lemma cosh_sinh y : cosh y * cosh y - sinh y * sinh y = 1.
Proof.
  unfold cosh, sinh. assert (exp y * exp (- y) = 1) by (rewrite <- exp_plus, Rplus_opp_r; apply exp_0).
  nra.
Qed.

Lemma tanh_0 : tanh 0 = 0.
Proof. unfold tanh. rewrite sinh_0. unfold Rdiv. ring. Qed.

(* The slope of tanh is 1/cosh^2. *)
Lemma tanh_slope y : derivable_pt_lim tanh y (/ (cosh y * cosh y)).
Proof.
  pose proof (cosh_pos y).
  replace (/ (cosh y * cosh y)) with ((cosh y * cosh y - sinh y * sinh y) / Rsqr (cosh y)).
  - apply (derivable_pt_lim_div sinh cosh y (cosh y) (sinh y)).
    + apply derivable_pt_lim_sinh.
    + apply derivable_pt_lim_cosh.
    + lra.
  - rewrite cosh_sinh. unfold Rsqr. field. lra.
Qed.

(* The slope between two places is one in between. *)
Lemma steepness f slope most a b : (forall y, derivable_pt_lim f y (slope y)) ->
  (forall y, 0 <= Rabs (slope y) <= most) -> Rabs (f a - f b) <= most * Rabs (a - b).
Proof.
  intros D M.
  assert (ordered : forall x y, x < y -> Rabs (f y - f x) <= most * Rabs (y - x)).
  { intros x y L. destruct (MVT_cor2 f slope x y L) as [z [E _]]; [auto|].
    rewrite E, Rabs_mult. apply Rmult_le_compat_r; [apply Rabs_pos | apply M]. }
  destruct (Rtotal_order a b) as [L|[->|L]].
  - rewrite Rabs_minus_sym, (Rabs_minus_sym a). auto.
  - unfold Rminus. rewrite !Rplus_opp_r, Rabs_R0. lra.
  - auto.
Qed.

Lemma tanh_lipschitz a b : Rabs (tanh a - tanh b) <= Rabs (a - b).
Proof.
  rewrite <- (Rmult_1_l (Rabs (a - b))). apply steepness with (slope := fun y => / (cosh y * cosh y)).
  - apply tanh_slope.
  - intros y. pose proof (cosh_pos y). pose proof (cosh_sinh y).
    assert (1 <= cosh y * cosh y) by nra.
    assert (0 < / (cosh y * cosh y)) by (apply Rinv_0_lt_compat; lra).
    rewrite Rabs_pos_eq by lra. split; [lra|].
    rewrite <- Rinv_1. apply Rinv_le_contravar; lra.
Qed.

Definition cap (c x : R) : R := c * tanh (x / c).

Theorem cap_lipschitz c x y : 0 < c -> Rabs (cap c x - cap c y) <= Rabs (x - y).
Proof.
  intros C. unfold cap. rewrite <- Rmult_minus_distr_l, Rabs_mult, (Rabs_pos_eq c) by lra.
  replace (x - y) with (c * (x / c - y / c)) by (field; lra).
  rewrite Rabs_mult, (Rabs_pos_eq c) by lra.
  apply Rmult_le_compat_l; [lra | apply tanh_lipschitz].
Qed.

(* So bounds on the sum of squares of errors of scores hold for capped ones with a bias, too. *)
Theorem cap_squares {key : Type} (keys : list key) (x y b : key -> R) c : 0 < c ->
  let moved k := (cap c (x k) + b k) - (cap c (y k) + b k) in
  total keys (fun k => moved k * moved k) <= total keys (fun k => (x k - y k) * (x k - y k)).
Proof.
  intros C moved. apply total_le. intros k _. unfold moved.
  replace (cap c (x k) + b k - (cap c (y k) + b k)) with (cap c (x k) - cap c (y k)) by ring.
  apply Rsqr_le_abs_1, cap_lipschitz, C.
Qed.

(* The first terms of the series of cosh, none of which is negative. *)
Lemma cosh_ge y : 1 + y * y / 2 + y * y * (y * y) / 24 <= cosh y.
Proof.
  unfold cosh.
  enough (2 * (1 + y * y / 2 + y * y * (y * y) / 24) <= exp y + exp (- y)) by lra.
  set (low := 2 * (1 + y * y / 2 + y * y * (y * y) / 24)).
  apply (@Rle_cv_lim (fun _ => low) (fun n => series y (n + 4) + series (- y) (n + 4))).
  2: { intros eps E. exists 0%nat. intros. now rewrite R_dist_eq. }
  2: { apply (CV_plus (fun n => series y (n + 4)) (fun n => series (- y) (n + 4))); apply series_converges. }
  intros n. unfold series. induction n as [|n IH].
  - unfold low. simpl. lra.
  - replace (S n + 4)%nat with (S (n + 4)) by reflexivity. rewrite !tech5. eapply Rle_trans; [exact IH|].
    set (i := S (n + 4)). assert (0 <= / INR (fact i)) by (left; apply Rinv_0_lt_compat, INR_fact_lt_0).
    assert (0 <= y ^ i + (- y) ^ i); [|nra].
    replace (- y) with (-1 * y) by ring. rewrite Rpow_mult_distr.
    destruct (Nat.Even_or_Odd i) as [[j ->]|[j ->]].
    + rewrite pow_1_even. pose proof (pow_Rsqr y j). rewrite H0. pose proof (pow_le (Rsqr y) j (Rle_0_sqr y)). lra.
    + replace (2 * j + 1)%nat with (S (2 * j)) by now rewrite Nat.add_1_r. rewrite pow_1_odd. lra.
Qed.

Theorem peak y : y / (cosh y * cosh y) < 0.45.
Proof.
  pose proof (cosh_ge y). pose proof (cosh_pos y).
  set (z := y * y) in *. assert (0 <= z) by (unfold z; nra).
  apply Rmult_lt_reg_r with (cosh y * cosh y); [nra|].
  replace (y / (cosh y * cosh y) * (cosh y * cosh y)) with y by (field; lra).
  apply Rlt_le_trans with (0.45 * ((1 + z / 2 + z * z / 24) * (1 + z / 2 + z * z / 24))); [|nra].
  assert (1 + z + z * z / 3 + z * z * z / 24 <= (1 + z / 2 + z * z / 24) * (1 + z / 2 + z * z / 24)).
  { assert (0 <= z * z) by nra. assert (0 <= z * z * (z * z)) by nra. lra. }
  (* Tangents of z^2 and of z^3 at .6, and a square. *)
  pose proof (square_nonneg (z - 0.6)).
  assert (0 <= (z - 0.6) * (z - 0.6) * (z + 1.2)) by (apply Rmult_le_pos; lra).
  pose proof (square_nonneg (y - 0.77)).
  assert (y < 0.45 * (1 + z + z * z / 3 + z * z * z / 24)); [|lra].
  assert (z - 1.54 * y + 0.5929 >= 0) by (unfold z; lra).
  lra.
Qed.

(* So an error of the exponent of e^(-2x/c), which is a factor e^t of x/c, moves tanh by at most .45 |t|. *)
Theorem cap_exponent y t : Rabs (tanh (y * exp t) - tanh y) <= 0.45 * Rabs t.
Proof.
  assert (S : forall t, derivable_pt_lim (fun t => tanh (y * exp t)) t
                (/ (cosh (y * exp t) * cosh (y * exp t)) * (y * exp t))).
  { intros s. apply (derivable_pt_lim_comp (fun t => y * exp t) tanh).
    - apply (derivable_pt_lim_scal exp). apply derivable_pt_lim_exp.
    - apply tanh_slope. }
  pose proof (steepness _ _ 0.45 t 0 S) as L.
  cbv beta in L. rewrite exp_0, Rmult_1_r, Rminus_0_r in L. apply L.
  intros s. split; [apply Rabs_pos|].
  set (x := y * exp s). pose proof (peak x) as P. pose proof (peak (- x)) as N.
  assert (cosh (- x) = cosh x) as E by (unfold cosh; rewrite Ropp_involutive; field).
  rewrite E in N. unfold Rdiv in *. apply Rabs_le. nra.
Qed.
