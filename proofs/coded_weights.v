(* Attention of which some weights come from codes: sums of the real weights, and the plain bound of the distance. *)

Require Import Certk.sums Certk.total_variation Certk.normalised Certk.odds Certk.exponential.

(* The used weights are u. A real weight is u e^(x + r) and what was flushed: x is the error of a code (0 without one), r that of
   roundings. Y and G bound what x moves, to first order and beyond. *)
Section Row.
Context {key : Type}.
Variable keys : list key.
Variables u x r flushed : key -> R.
Variables rho F Y G : R.
Definition real k := u k * exp (x k + r k) + flushed k.

Hypothesis used : forall k, In k keys -> 0 <= u k.
Hypothesis rounding : forall k, In k keys -> Rabs (r k) <= rho.
Hypothesis rho_nonneg : 0 <= rho.
Hypothesis lost : forall k, In k keys -> 0 <= flushed k.
Hypothesis lost_together : total keys flushed <= F.
Hypothesis root : total keys (fun k => u k * Rabs (x k)) <= Y.
Hypothesis curved : total keys (fun k => u k * (exp (x k) - 1 - x k)) <= G.
Hypothesis some_used : 0 < total keys u.

Let U := total keys u.
Let Z := total keys real.

Lemma rounded k : In k keys -> exp (- rho) <= exp (r k) <= exp rho.
Proof.
  intros I. destruct (abs_bounds _ _ (rounding k I)).
  split; apply exp_le_grows; lra.
Qed.

Lemma shrunk_ge : 1 - exp (- rho) <= exp rho - 1.
Proof. pose proof (exp_ge_line rho). pose proof (exp_ge_line (- rho)). lra. Qed.

(* e^(x + r) - 1 from above and below. *)
Lemma factor_upper k : In k keys ->
  exp (x k + r k) - 1 <= exp rho * (x k + (exp (x k) - 1 - x k)) + (exp rho - 1).
Proof.
  intros I. rewrite exp_plus. destruct (rounded k I). pose proof (exp_pos (x k)). nra.
Qed.

Lemma factor_lower k : In k keys -> exp (- rho) * x k - (exp rho - 1) <= exp (x k + r k) - 1.
Proof.
  intros I. rewrite exp_plus. destruct (rounded k I). pose proof (exp_pos (x k)).
  pose proof (exp_ge_line (x k)). pose proof (exp_pos (- rho)). pose proof shrunk_ge. nra.
Qed.

Lemma real_nonneg k : In k keys -> 0 <= real k.
Proof.
  intros I. unfold real. specialize (used k I). specialize (lost k I).
  pose proof (exp_pos (x k + r k)). nra.
Qed.

Lemma some_real : 0 < Z.
Proof.
  destruct (Rle_lt_dec Z 0) as [N|P]; [exfalso|easy].
  assert (total keys u <= total keys (fun _ => 0)); [|rewrite total_zero in *; lra].
  apply total_le. intros k I. pose proof (member_le keys real k real_nonneg I) as M. fold Z in M.
  unfold real in M. specialize (used k I). specialize (lost k I). pose proof (exp_pos (x k + r k)). nra.
Qed.

Lemma masses_low : exp (- rho) * (U - Y) <= Z.
Proof.
  apply Rle_trans with (exp (- rho) * total keys (fun k => u k - u k * Rabs (x k))).
  - apply Rmult_le_compat_l; [left; apply exp_pos|]. rewrite total_minus. fold U. lra.
  - rewrite <- total_times. apply total_le. intros k I. unfold real. rewrite exp_plus.
    specialize (used k I). specialize (lost k I). destruct (rounded k I).
    pose proof (exp_ge_line (x k)). pose proof (exp_pos (x k)). pose proof (exp_pos (- rho)).
    pose proof (Rle_abs (- x k)). rewrite Rabs_Ropp in *.
    assert (u k - u k * Rabs (x k) <= u k * exp (x k)) by nra.
    assert (0 <= u k * exp (x k)) by nra.
    assert (exp (- rho) * (u k - u k * Rabs (x k)) <= exp (- rho) * (u k * exp (x k))) by nra.
    nra.
Qed.

(* The sum over keys of whatever is at most e^rho times (a + what is beyond x) and (e^rho - 1) u, and what was flushed. *)
Lemma collect a A f :
  total keys a <= A ->
  (forall k, In k keys ->
    f k <= exp rho * (a k + u k * (exp (x k) - 1 - x k)) + (exp rho - 1) * u k + flushed k) ->
  total keys f <= exp rho * (A + G) + (exp rho - 1) * U + F.
Proof.
  intros HA Hf. eapply Rle_trans; [apply (total_le _ _ _ Hf)|].
  rewrite !total_plus, !total_times, total_plus. fold U. pose proof (exp_pos rho). nra.
Qed.

Lemma changes_more : more keys u real <= exp rho * (Y + G) + (exp rho - 1) * U + F.
Proof.
  apply (collect (fun k => u k * Rabs (x k))); [easy|]. intros k I.
  specialize (used k I). specialize (lost k I).
  pose proof (exp_ge_1 rho rho_nonneg). pose proof (exp_ge_line (x k)).
  pose proof (Rabs_pos (x k)). pose proof (Rle_abs (x k)). pose proof (factor_upper k I).
  assert (0 <= exp rho * (u k * Rabs (x k) + u k * (exp (x k) - 1 - x k))).
  { apply Rmult_le_pos; [lra|]. rewrite <- Rmult_plus_distr_l. apply Rmult_le_pos; lra. }
  apply Rmax_lub; [|nra]. unfold real.
  assert (u k * (exp (x k + r k) - 1) <= u k * (exp rho * (Rabs (x k) + (exp (x k) - 1 - x k)) + (exp rho - 1))).
  { apply Rmult_le_compat_l; [easy|]. nra. }
  lra.
Qed.

Lemma changes_less : less keys u real <= Y + (exp rho - 1) * U.
Proof.
  apply Rle_trans with (total keys (fun k => u k * Rabs (x k) + (exp rho - 1) * u k)).
  - apply total_le. intros k I. specialize (used k I). specialize (lost k I).
    pose proof (exp_ge_1 rho rho_nonneg). pose proof (Rabs_pos (x k)). pose proof (factor_lower k I).
    assert (exp (- rho) <= 1) by (rewrite <- exp_0; apply exp_le_grows; lra). pose proof (exp_pos (- rho)).
    assert (- Rabs (x k) <= exp (- rho) * x k).
    { pose proof (Rle_abs (- x k)). rewrite Rabs_Ropp in *. pose proof (Rle_abs (x k)). nra. }
    apply Rmax_lub; [|nra]. unfold real. nra.
  - rewrite total_plus, total_times. fold U. lra.
Qed.

Lemma masses_high : Z <= exp rho * (U + Y + G) + F.
Proof.
  pose proof changes_more. pose proof (more_minus_less keys u real) as E.
  pose proof (less_nonneg keys u real). fold U Z in E. lra.
Qed.

(* The used sum enters by bounds from both sides. *)
Lemma plain_bound U_low U_high : 0 < U_low <= U -> U <= U_high ->
  let K := exp rho * (Y + G) + (exp rho - 1) * U_high + F in
  let L := Rmin U_high (Y + (exp rho - 1) * U_high) in
  distance keys (share keys u) (share keys real) <= Rmax K L / (U_low + (Rmax K L - L)).
Proof.
  intros Hl Hh K L. pose proof (exp_ge_1 rho rho_nonneg).
  assert ((exp rho - 1) * U <= (exp rho - 1) * U_high) by (apply Rmult_le_compat_l; lra).
  apply normalised_bounds; auto using real_nonneg, some_real.
  - eapply Rle_trans; [apply changes_more|]. unfold K. lra.
  - apply Rmin_glb; [eapply Rle_trans; [apply less_le_used|]; auto using real_nonneg|].
    eapply Rle_trans; [apply changes_less|]. lra.
Qed.

(* Shares of a set and the rest: H bounds what x moves when each key counts with the share of the side that it is not on. *)
Definition crossing S (k : key) : R :=
  let p := total keys (part S u) / U in if S k then 1 - p else p.

Lemma centred_row H Z_low :
  (forall S, total keys (part S u) <= U / 2 -> total keys (fun k => crossing S k * u k * Rabs (x k)) <= H) ->
  0 < Z_low <= Z ->
  distance keys (share keys u) (share keys real) <= (exp rho * (H + G) + (exp rho - 1) * U + F) / Z_low.
Proof.
  intros HH HZ. pose proof some_real as Zp.
  assert (Up : 0 < U) by exact some_used.
  set (S := gaining (share keys u) (share keys real)).
  set (p := total keys (part S u) / U).
  pose proof (part_nonneg S keys u used) as Sp. pose proof (part_nonneg (out S) keys u used) as Rp.
  pose proof (total_part S keys u) as US. fold U in US.
  assert (P : p * U = total keys (part S u)) by (unfold p; field; lra).
  assert (p01 : 0 <= p <= 1) by (split; nra).
  (* The distance is this sum over Z. *)
  set (e := fun k => if S k then 1 - p else - p).
  assert (D : distance keys (share keys u) (share keys real) = total keys (fun k => e k * (real k - u k)) / Z).
  { rewrite distance_is_gain by (rewrite !total_share; fold U Z; lra). fold S.
    rewrite !total_part_share. fold U Z p.
    assert (total keys (fun k => e k * (real k - u k))
            = (total keys (part S real) - p * Z) - (total keys (part S u) - p * U)) as ->.
    { unfold Z, U. rewrite <- !total_times, <- !total_minus. apply total_ext. intros k _.
      unfold e, part. destruct (S k); ring. }
    rewrite P. field. lra. }
  (* The sides change places where S has more than half. *)
  assert (C : total keys (fun k => Rabs (e k) * u k * Rabs (x k)) <= H).
  { destruct (Rle_lt_dec (total keys (part S u)) (U / 2)) as [h|h].
    - eapply Rle_trans; [|apply (HH S h)]. apply Req_le, total_ext. intros k _.
      unfold crossing, e. fold p. destruct (S k);
        [rewrite Rabs_pos_eq by lra | rewrite Rabs_Ropp, Rabs_pos_eq by lra]; reflexivity.
    - eapply Rle_trans; [|apply (HH (out S)); lra]. apply Req_le, total_ext. intros k _.
      unfold crossing, e. replace (total keys (part (out S) u) / U) with (1 - p) by (unfold p; rewrite US; field; lra).
      unfold out. destruct (S k); simpl; [rewrite Rabs_pos_eq by lra | rewrite Rabs_Ropp, Rabs_pos_eq by lra]; ring. }
  assert (B : total keys (fun k => e k * (real k - u k)) <= exp rho * (H + G) + (exp rho - 1) * U + F).
  { apply (collect (fun k => Rabs (e k) * u k * Rabs (x k))); [exact C|]. intros k I.
    specialize (used k I). specialize (lost k I). pose proof (exp_ge_1 rho rho_nonneg).
    pose proof (factor_upper k I). pose proof (factor_lower k I). pose proof (exp_ge_line (x k)).
    pose proof (Rle_abs (x k)). pose proof (Rle_abs (- x k)). rewrite Rabs_Ropp in *. pose proof (Rabs_pos (x k)).
    assert (exp (- rho) <= exp rho) by (apply exp_le_grows; lra). pose proof (exp_pos (- rho)).
    set (beyond := exp (x k) - 1 - x k) in *. assert (0 <= beyond) by (unfold beyond; lra).
    assert (0 <= u k * beyond) by nra.
    unfold e. destruct (S k).
    - rewrite Rabs_pos_eq by lra.
      assert (step : u k * (exp (x k + r k) - 1) <= u k * (exp rho * (Rabs (x k) + beyond) + (exp rho - 1)))
        by (apply Rmult_le_compat_l; nra).
      apply Rle_trans with ((1 - p) * (u k * (exp rho * (Rabs (x k) + beyond) + (exp rho - 1)) + flushed k)).
      + apply Rmult_le_compat_l; [lra|]. unfold real. lra.
      + assert (0 <= exp rho * (u k * beyond)) by nra. assert (0 <= (exp rho - 1) * u k) by nra. nra.
    - rewrite Rabs_Ropp, Rabs_pos_eq by lra.
      assert (- (exp rho * Rabs (x k)) <= exp (- rho) * x k) by nra.
      assert (step : u k * (1 - exp (x k + r k)) <= u k * (exp rho * Rabs (x k) + (exp rho - 1)))
        by (apply Rmult_le_compat_l; lra).
      apply Rle_trans with (p * (u k * (exp rho * Rabs (x k) + (exp rho - 1)))).
      + replace (- p * (real k - u k)) with (p * (u k - real k)) by ring.
        apply Rmult_le_compat_l; [lra|]. unfold real. lra.
      + assert (0 <= exp rho * (u k * beyond)) by nra. assert (0 <= (exp rho - 1) * u k) by nra. nra. }
  rewrite D.
  assert (0 <= total keys (fun k => e k * (real k - u k)) / Z).
  { rewrite <- D. unfold distance. apply Rmult_le_pos; [|lra]. apply total_nonneg. intros. apply Rabs_pos. }
  assert (0 <= total keys (fun k => e k * (real k - u k))).
  { apply Rmult_le_reg_r with (/ Z); [now apply Rinv_0_lt_compat|]. rewrite Rmult_0_l. easy. }
  apply Rmult_le_compat; [easy | left; now apply Rinv_0_lt_compat | easy | apply Rinv_le_contravar; lra].
Qed.
End Row.
