(* The exponential function between a line and a parabola. *)

Require Import Arith Certk.sums.

(* Of the part of e^x - 1 beyond x, as a share of x^2, for |x| <= D. *)
Definition growth (D : R) : R := (exp D - 1 - D) / (D * D).

Lemma exp_le_grows a b : a <= b -> exp a <= exp b.
Proof. intros [L| ->]; [left; now apply exp_increasing | lra]. Qed.

Lemma exp_ge_line x : 1 + x <= exp x.
Proof. apply exp_ineq1_le. Qed.

Definition series x n := sum_f_R0 (fun i => / INR (fact i) * x ^ i) n.

Lemma series_converges x from : Un_cv (fun n => series x (n + from)) (exp x).
Proof.
  unfold exp. destruct (exist_exp x) as [l H]. simpl.
  intros eps E. destruct (H eps E) as [N HN]. exists N. intros n L. apply HN.
  apply Nat.le_trans with n; [easy | apply Nat.le_add_r].
Qed.

(* The series without its first two terms. *)
Local Definition beyond x n := sum_f_R0 (fun i => / INR (fact (i + 2)) * x ^ (i + 2)) n.

Lemma beyond_is x n : beyond x n = series x (n + 2) - 1 - x.
Proof.
  unfold beyond, series. induction n as [|n IH].
  - simpl. field.
  - replace (S n + 2)%nat with (S (n + 2)) by reflexivity.
    rewrite tech5, IH, tech5. simpl (S n + 2)%nat. ring.
Qed.

Lemma beyond_converges x : Un_cv (beyond x) (exp x - 1 - x).
Proof.
  intros eps E. destruct (series_converges x 2 eps E) as [N HN]. exists N. intros n L.
  rewrite beyond_is. specialize (HN n L). unfold R_dist in *.
  replace (series x (n + 2) - 1 - x - (exp x - 1 - x)) with (series x (n + 2) - exp x) by ring. easy.
Qed.

Lemma exp_le_parabola D x : Rabs x <= D -> exp x <= 1 + x + growth D * (x * x).
Proof.
  intros B. pose proof (Rabs_pos x).
  destruct (Req_dec D 0) as [Z|N].
  { assert (x = 0) as -> by (apply abs_bounds in B; lra). rewrite exp_0. lra. }
  assert (term : forall n, beyond x n <= beyond D n * (x * x / (D * D))).
  { intros n. unfold beyond. rewrite Rmult_comm, scal_sum. apply sum_Rle. intros i _.
    replace (/ INR (fact (i + 2)) * x ^ (i + 2))
      with (/ INR (fact (i + 2)) * (x * x) * x ^ i) by (rewrite pow_add; simpl; ring).
    replace (/ INR (fact (i + 2)) * D ^ (i + 2) * (x * x / (D * D)))
      with (/ INR (fact (i + 2)) * (x * x) * D ^ i) by (rewrite pow_add; simpl; field; repeat split; auto using INR_fact_neq_0).
    apply Rmult_le_compat_l.
    - apply Rmult_le_pos; [left; apply Rinv_0_lt_compat, INR_fact_lt_0 | nra].
    - apply Rle_trans with (Rabs (x ^ i)); [apply Rle_abs|].
      rewrite <- RPow_abs. apply pow_incr. lra. }
  assert (exp x - 1 - x <= (exp D - 1 - D) * (x * x / (D * D))); [|unfold growth; unfold Rdiv in *; nra].
  eapply Rle_cv_lim; [exact term | apply beyond_converges |].
  apply (CV_mult (beyond D) (fun _ => x * x / (D * D))); [apply beyond_converges|].
  intros eps E. exists 0%nat. intros. now rewrite R_dist_eq.
Qed.

Lemma growth_nonneg D : 0 <= growth D.
Proof.
  unfold growth. destruct (Req_dec D 0) as [->|N].
  - rewrite exp_0. unfold Rdiv. replace (1 - 1 - 0) with 0 by ring. rewrite Rmult_0_l. lra.
  - apply Rmult_le_pos; [pose proof (exp_ge_line D); lra|].
    left. apply Rinv_0_lt_compat. nra.
Qed.

Lemma exp_minus_1_abs D x : Rabs x <= D -> Rabs (exp x - 1) <= Rabs x * (1 + growth D * D).
Proof.
  intros B. pose proof (exp_le_parabola D x B). pose proof (exp_ge_line x). pose proof (growth_nonneg D).
  pose proof (Rabs_pos x).
  assert (x * x = Rabs x * Rabs x) as Q by (rewrite <- Rabs_mult, Rabs_pos_eq; nra).
  assert (x * x <= Rabs x * D) by (rewrite Q; nra).
  assert (growth D * (x * x) <= growth D * (Rabs x * D)) by nra.
  pose proof (Rle_abs x). pose proof (Rle_abs (- x)). rewrite Rabs_Ropp in *.
  assert (0 <= growth D * (Rabs x * D)) by nra.
  apply Rabs_le. lra.
Qed.

Lemma exp_minus_1_abs_le D x : Rabs x <= D -> Rabs (exp x - 1) <= exp D - 1.
Proof.
  intros B. apply abs_bounds in B.
  pose proof (exp_le_grows x D). pose proof (exp_le_grows (- D) x). pose proof (exp_ge_line (- D)).
  pose proof (exp_ge_line D). apply Rabs_le. lra.
Qed.
